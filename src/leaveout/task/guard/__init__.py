"""Second derivatives compared with finite differences of the gradient: which forms are correct for an objective."""
