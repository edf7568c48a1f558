"""Batches that ``Trainer`` skips when it resumes from a checkpoint in the middle of an epoch.

It then draws the rest of the epoch from a new loader that accelerate builds, and callbacks are not told of it. So the
function that builds it is replaced during such a training by one that lets the new loader be followed too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import trainer

FUNCTION = "skip_first_batches"


class Skipping:
    """Calls ``follow`` with each loader that ``Trainer`` builds from this one for the rest of an epoch."""

    def __init__(self, loader: Any, follow: Callable[[Any], None]) -> None:
        self._loader, self._follow = loader, follow
        self._original = getattr(trainer, FUNCTION)
        setattr(trainer, FUNCTION, self._skipped)

    def release(self) -> None:
        """Restore the original function."""
        if getattr(trainer, FUNCTION) == self._skipped:
            setattr(trainer, FUNCTION, self._original)

    def _skipped(self, loader: Any, *args: Any, **kwargs: Any) -> Any:
        rest = self._original(loader, *args, **kwargs)
        if loader is self._loader:
            self._follow(rest)
        return rest
