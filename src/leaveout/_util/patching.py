"""Replacements of another library's functions for as long as any thread needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock


class Patch:
    """A context in which something is replaced; several threads may be inside at once.

    ``put`` is called with True when one comes in, and with False when the last one has left.

    >>> seen = []
    >>> patch = Patch(seen.append)
    >>> with patch.inside():
    ...     with patch.inside():
    ...         pass
    >>> seen
    [True, True, True, False]
    """

    def __init__(self, put: Callable[[bool], object]) -> None:
        self._put, self._lock, self._count = put, Lock(), 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Replace it in this context."""
        self._enter(1)
        try:
            yield
        finally:
            self._enter(-1)

    def _enter(self, change: int) -> None:
        with self._lock:
            self._count += change
            self._put(self._count > 0)
