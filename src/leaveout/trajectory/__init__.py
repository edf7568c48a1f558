"""A run together with its task: recorded steps, the step check, left-out examples, exact replay."""
