"""Helpers that know nothing of training: trees of tensors, files, hashing, PNG, the allocator."""
