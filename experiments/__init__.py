"""Tools for the project itself, in a checkout only: reproduce/ (the published tables), bench/ (speed and fidelity)."""
