"""How one recorded step is differentiated: the operator of its batch, and one class per curvature."""
