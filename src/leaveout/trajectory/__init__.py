"""A run together with its objective: recorded steps, the step check, left-out examples, exact replay."""
