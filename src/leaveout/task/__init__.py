"""The objective as pure functions of the parameters: task, batches, derivatives, checks."""
