"""Forward passes that are not the training's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_DEPTH = [0]


@contextmanager
def aside() -> Iterator[None]:
    """Let no recorder note the forward passes in this context."""
    _DEPTH[0] += 1
    try:
        yield
    finally:
        _DEPTH[0] -= 1


def is_aside() -> bool:
    """Return whether forward passes are not to be noted."""
    return _DEPTH[0] > 0
