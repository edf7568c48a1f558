"""A run seen through its task: recorded steps, the step check, left-out examples, exact replay."""
