"""Helpers that know nothing about training: trees of tensors, files, hashing, PNG."""
