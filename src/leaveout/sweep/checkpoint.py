"""Checkpoints of a long sweep, saved every so often, so that a sweep that was killed continues from there.

A sweep is one chain of steps: it cannot be cut into shards, but what it carries from step to step can be saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from leaveout._util.files import read_sealed, save_sealed
from leaveout._util.trees import State
from leaveout.compute.cost import Cost

EVERY = 60.0
"""Seconds between two checkpoints."""

SHARE = 20
"""A checkpoint that took t seconds to write is followed by at least this many times t of work."""


@dataclass(frozen=True)
class SavedSweep:
    """A sweep in progress: the steps before ``step`` remain, with these vectors, and what was gathered so far."""

    step: int
    vectors: State
    gathered: dict[str, Tensor]


class SweepCheckpoint:
    """Where one sweep saves how far it is; without a file it saves nothing."""

    def __init__(self, file: Path | None, cost: Cost, device: torch.device) -> None:
        self._file, self._cost, self._device = file, cost, device
        self._next = time.monotonic() + EVERY

    def saved(self) -> SavedSweep | None:
        """Read what an earlier process saved of the same sweep, if it did, and count what that cost."""
        if self._file is None:
            return None
        try:
            tensors, facts = read_sealed(self._file)
        except (OSError, ValueError):
            return None
        if facts["file"] != self._file.name:
            return None
        tensors = {key: t.to(self._device) if t.is_floating_point() else t for key, t in tensors.items()}
        self._cost.hvps += facts["hvps"]
        self._cost.gradients += facts["gradients"]
        vectors: State = {}
        for key in [key for key in tensors if key.startswith("vectors/")]:
            _, slot, name = key.split("/", 2)
            vectors.setdefault(slot, {})[name] = tensors.pop(key)
        order = facts["order"]  # safetensors sorts names, and torch.func compares their order
        return SavedSweep(facts["step"], {slot: {n: vectors[slot][n] for n in order[slot]} for slot in order}, tensors)

    def note(self, step: int, vectors: State, gathered: Callable[[], dict[str, Tensor]]) -> None:
        """Note that the steps from ``step`` on are done; saved if it is time."""
        if self._file is None or time.monotonic() < self._next:
            return
        start = time.monotonic()
        facts = {"file": self._file.name, "step": step, "hvps": self._cost.hvps, "gradients": self._cost.gradients}
        facts["order"] = {slot: list(params) for slot, params in vectors.items()}
        flat = {f"vectors/{slot}/{name}": t for slot, params in vectors.items() for name, t in params.items()}
        save_sealed(self._file, {**flat, **gathered()}, facts)
        self._next = time.monotonic() + max(EVERY, SHARE * (time.monotonic() - start))
