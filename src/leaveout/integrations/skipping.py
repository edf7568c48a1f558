"""Batches that ``Trainer`` passes over when it goes on from a checkpoint in the middle of an epoch.

It then draws the rest of the epoch from a loader that accelerate makes anew, of which callbacks do not learn. So the
function that makes it is replaced while such a training lasts, by one that lets the new loader be followed too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import trainer

FUNCTION = "skip_first_batches"


class Skipping:
    """Has ``follow`` called with each loader that ``Trainer`` makes for the rest of an epoch of another one."""

    def __init__(self, loader: Any, follow: Callable[[Any], None]) -> None:
        self._loader, self._follow = loader, follow
        self._original = getattr(trainer, FUNCTION)
        setattr(trainer, FUNCTION, self._skipped)

    def release(self) -> None:
        """Put the function back."""
        if getattr(trainer, FUNCTION) == self._skipped:
            setattr(trainer, FUNCTION, self._original)

    def _skipped(self, loader: Any, *args: Any, **kwargs: Any) -> Any:
        rest = self._original(loader, *args, **kwargs)
        if loader is self._loader:
            self._follow(rest)
        return rest
