"""Where work runs and what it may use: resources, cost, progress, engines, jobs."""
