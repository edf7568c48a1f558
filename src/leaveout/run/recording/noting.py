"""Batches noted as they are drawn, and read for their fingerprints a few steps later, many at a time.

What runs once per step finds its code and data no longer in the processor's caches and takes several times as long as
when it is repeated. So small batches are held, and read together. That is right only if nothing writes to them in the
meantime: the first ones are also read at once, and both compared; after that, every tensor's version is. (A loop that
begins later to write to its batches, and by ways that no version counts, gets fingerprints of what it wrote. Scoring
then refuses these batches.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leaveout.task import batches
from leaveout.task.batches import Batch, Summed

HELD = 16
"""How many tensors are held before they are read together."""

LARGEST = 1 << 18
"""The size in bytes up to which a tensor is held; to read a larger one takes long in any case."""


class Held:
    """A tensor to be read later; ``early`` is what was read at once, if it was."""

    def __init__(self, tensor: Tensor, early: Any = None) -> None:
        self._tensor: Tensor | None = tensor
        self._version, self._early = tensor._version, early
        self._found: Any = None

    def read(self) -> Any:
        """Return what its fingerprint is made of; None if the tensor was written to before it was read."""
        tensor = self._tensor
        if tensor is not None:  # the writer's thread may be here at the same time, and then both find the same
            found = batches.noted(tensor)[0]
            unchanged = tensor._version == self._version  # after reading: the loop may go on meanwhile
            self._found = found if unchanged else None
            self._tensor = None
        return self._found if self._early is None else self._early

    def is_unchanged(self) -> bool:
        """Say whether reading it later gave what it held when it was drawn, as far as that can be seen."""
        self.read()
        return self._found is not None and (self._early is None or _alike(self._found, self._early))


class Noting:
    """Notes the batches of one training, at once or later, depending on what its loop does with them."""

    def __init__(self) -> None:
        self._held: list[Held] = []
        self._proven = self._at_once = False

    def __call__(self, batch: Batch) -> list[Any]:
        """Return the leaves of a batch to be fingerprinted later, like ``batches.noted``; some may be ``Held``."""
        if self._at_once:
            return batches.noted(batch)
        found = [self._held_or_noted(leaf) for leaf in batches.leaves(batch)]
        self._held += [leaf for leaf in found if isinstance(leaf, Held)]
        if len(self._held) >= HELD:
            unchanged = [held.is_unchanged() for held in self._held]
            self._at_once, self._proven, self._held = not all(unchanged), True, []
        return found

    def _held_or_noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.device.type != "cpu" or leaf.is_inference() or leaf.numel() * leaf.element_size() > LARGEST:
            return batches.noted(leaf)[0]
        return Held(leaf, None if self._proven else batches.noted(leaf)[0])


def read(noted: Sequence[Any]) -> list[Any]:
    """Return the leaves of a batch, all read; none if one was written to before that: then there is no fingerprint."""
    leaves = [leaf.read() if isinstance(leaf, Held) else leaf for leaf in noted]
    lost = any(leaf is None for leaf, given in zip(leaves, noted, strict=True) if isinstance(given, Held))
    return [] if lost else leaves


def fingerprints(steps: Sequence[Any]) -> list[list[tuple[int, int]]]:
    """Return the fingerprints of the batches of ``Record`` or ``StepInputs`` objects, computing deferred ones."""
    deferred = batches.fingerprints([read(step.unhashed) for step in steps])
    return [computed or step.fingerprint for computed, step in zip(deferred, steps, strict=True)]


def _alike(one: Tensor | Summed, other: Tensor | Summed) -> bool:
    if isinstance(one, Summed) and isinstance(other, Summed):
        return np.array_equal(one.sums, other.sums)
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
