"""Gradient scaling (``torch.amp.GradScaler``), found as the loop uses it: which factor a step's loss was given."""

from __future__ import annotations

import inspect

from torch.amp import GradScaler

DEEP = 12
"""How many callers of ``optimizer.step`` are looked at: hooks, profilers and wrappers of optimizers lie between."""


def scale_of_step(autocast: str | None) -> float:
    """What the loss of the step that is about to be taken was multiplied by; it matters in float16 alone."""
    scaler = calling_scaler() if autocast == "float16" else None
    return 1.0 if scaler is None else scaler.get_scale()


def calling_scaler() -> GradScaler | None:
    """The scaler whose ``step`` is calling the optimizer's, where there is one."""
    frame = inspect.currentframe()
    for _ in range(DEEP):
        if frame is None:
            return None
        if isinstance(owner := frame.f_locals.get("self"), GradScaler):
            return owner
        frame = frame.f_back
    return None
