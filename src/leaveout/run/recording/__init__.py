"""A training loop as it runs: everything that has its hooks in it, up to the writer."""
