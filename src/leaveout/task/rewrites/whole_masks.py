"""Attention masks of ``transformers`` that stay where they hide nothing.

The library looks at a batch's mask and leaves it out if every token counts. Under ``vmap`` and in a trace nothing can
be looked at, so that such models had to be differentiated one example at a time and without traces. Told that it is
being traced, the library keeps every mask, which changes attention by rounding only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

HOME, ASKED = "transformers.masking_utils", "is_tracing"
"""The module that makes masks, and what it asks before it looks at one."""

_LOCK = Lock()
_within = 0
_original: Callable | None = None


@contextmanager
def whole_masks() -> Iterator[None]:
    """Keep every mask in this context. Several threads may be inside at once."""
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(change: int) -> None:
    global _within, _original
    with _LOCK:
        _within += change
        module = sys.modules.get(HOME)
        asked = getattr(module, ASKED, None)
        if _within and asked not in (None, _always):
            _original = asked
            setattr(module, ASKED, _always)
        elif not _within and asked is _always:
            setattr(module, ASKED, _original)


def _always(tensor: Any = None) -> bool:  # noqa: ARG001 - as transformers asks
    return True
