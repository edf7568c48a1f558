"""Tools of the project, not of its users: reproduce/ (the published tables), bench/ (speed and fidelity)."""
