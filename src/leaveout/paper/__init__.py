"""Tools for the project itself, not for its users: reproduce/ (the published tables), bench/ (speed and fidelity)."""
