"""Amounts of bytes as people write them."""

from __future__ import annotations

import math
import re

from leaveout.errors import InputError, is_whole

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_bytes(amount: str | int, what: str = "memory") -> int:
    """Parse an amount of bytes.

    >>> parse_bytes("2GB"), parse_bytes("1.5 kB"), parse_bytes(64)
    (2000000000, 1500, 64)
    """
    if is_whole(amount, 1):
        return int(amount)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", str(amount), re.IGNORECASE)
    size = float(match[1]) * UNITS[match[2].upper()] if match else 0.0
    if not 1 <= size < math.inf:
        raise InputError(
            f"{what}={repr(amount)[:40]} is not an amount of bytes: write it like '2GB' or 500_000_000.",
            code="bytes-unreadable",
        )
    return int(size)
