"""What became of the weights' average after each step, as a shard has it; only where an average was recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from leaveout.optim.averaging import Update

UPDATES = "step/average"
"""With a row for each step."""


def written(steps: list[Update | None]) -> dict[str, Tensor]:
    """The tensor of a shard's steps; none where no average was recorded."""
    if all(step is None for step in steps):
        return {}
    return {UPDATES: torch.tensor([step or Update() for step in steps], dtype=torch.float64)}


def read(shard: dict[str, Tensor], offset: int) -> Update | None:
    """One step's update."""
    return Update(*shard[UPDATES][offset].tolist()) if UPDATES in shard else None


def is_sound(shard: dict[str, Tensor], steps: int) -> bool:
    """Say whether the updates belong to so many steps."""
    updates = shard.get(UPDATES)
    if updates is None:
        return True
    shape = (steps, len(Update._fields))
    return updates.dtype == torch.float64 and updates.shape == shape and bool(torch.isfinite(updates).all())
