"""What the commands and experiments use: data sets, models, configs."""
