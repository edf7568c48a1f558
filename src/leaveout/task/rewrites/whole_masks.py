"""Attention masks of ``transformers`` that stay where they hide nothing.

The library looks at a batch's mask and leaves it out if every token counts. Under ``vmap`` and in a trace nothing can
be looked at, so that such models had to be differentiated one example at a time and without traces. Told that it is
being traced, the library keeps every mask, which changes attention by rounding only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from leaveout._util.patching import Patch

HOME, ASKED = "transformers.masking_utils", "is_tracing"
"""The module that makes masks, and what it asks before it looks at one."""

_original: Callable | None = None


def _put(inside: bool) -> None:
    global _original
    module = sys.modules.get(HOME)
    asked = getattr(module, ASKED, None)
    if inside and asked not in (None, _always):
        _original = asked
        setattr(module, ASKED, _always)
    elif not inside and asked is _always:
        setattr(module, ASKED, _original)


def _always(tensor: Any = None) -> bool:  # noqa: ARG001 - as transformers asks
    return True


whole_masks = Patch(_put).inside
"""A context in which every mask is kept."""
