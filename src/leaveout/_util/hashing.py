"""Hashes of many things at once, without a loop: they guard against accidents, not against an adversary."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def row_hashes(rows: np.ndarray) -> np.ndarray:
    """Hash each row of bytes by mixing the bits of its sum.

    >>> a, b, c = row_hashes(np.array([[1, 2, 3], [1, 2, 3], [3, 2, 1]], dtype=np.uint8))
    >>> bool(a == b), bool(a == c)
    (True, False)
    """
    return mixed(row_sums(rows))


def row_sums(rows: np.ndarray) -> np.ndarray:
    """Add up each row of bytes: Σ_j w_j x_j mod 2⁶⁴ over its 64-bit words x with fixed odd weights w."""
    words = -(-rows.shape[1] // 8)
    if rows.shape[1] % 8:
        padded = np.zeros((len(rows), 8 * words), np.uint8)
        padded[:, : rows.shape[1]] = rows
        rows = padded
    # Without intermediate products as large as the rows, whose memory would be allocated and freed each time.
    return np.einsum("ij,j->i", np.ascontiguousarray(rows).view(np.uint64), weights(words))


@lru_cache(maxsize=64)
def weights(count: int) -> np.ndarray:
    """Return fixed odd numbers without a pattern."""
    return mixed(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)


def mixed(x: np.ndarray) -> np.ndarray:
    """Mix the bits of numbers so that each depends on all: the last steps of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))
