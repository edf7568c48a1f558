"""Built-in data sets, models and configs, for the commands and experiments."""
