"""Second derivatives compared with differences of the gradient: which forms are right for a task."""
