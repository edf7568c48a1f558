"""Vectors carried through the linearised steps of a run."""
