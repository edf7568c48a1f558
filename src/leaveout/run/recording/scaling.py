"""Gradient scaling (``torch.amp.GradScaler``), found in the calling loop: the factor of each step's loss."""

from __future__ import annotations

import inspect

from torch.amp import GradScaler

DEEP = 12
"""How many callers of ``optimizer.step`` are searched: hooks, profilers and optimizer wrappers come in between."""


def scale_of_step(autocast: str | None) -> float:
    """Return the factor by which the loss of the coming step was multiplied; it matters only in float16."""
    scaler = calling_scaler() if autocast == "float16" else None
    return 1.0 if scaler is None else scaler.get_scale()


def calling_scaler() -> GradScaler | None:
    """Return the scaler whose ``step`` is calling the optimizer's, if there is one."""
    frame = inspect.currentframe()
    for _ in range(DEEP):
        if frame is None:
            return None
        if isinstance(owner := frame.f_locals.get("self"), GradScaler):
            return owner
        frame = frame.f_back
    return None
