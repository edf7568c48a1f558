"""How the average of the weights was updated after each step, as stored in a shard; only if one was recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from leaveout.optim.averaging import Update

UPDATES = "step/average"
"""One row per step."""


def written(steps: list[Update | None]) -> dict[str, Tensor]:
    """Return the tensor for a shard's steps; none if no average was recorded."""
    if all(step is None for step in steps):
        return {}
    return {UPDATES: torch.tensor([step or Update() for step in steps], dtype=torch.float64)}


def read(shard: dict[str, Tensor], offset: int) -> Update | None:
    """Read one step's update."""
    return Update(*shard[UPDATES][offset].tolist()) if UPDATES in shard else None


def is_sound(shard: dict[str, Tensor], steps: int) -> bool:
    """Say whether the updates are valid for this number of steps."""
    updates = shard.get(UPDATES)
    if updates is None:
        return True
    shape = (steps, len(Update._fields))
    return updates.dtype == torch.float64 and updates.shape == shape and bool(torch.isfinite(updates).all())
