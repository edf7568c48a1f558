"""Watches the vectors of a sweep through a run: reports where they grow without bound, and stops where they break."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from leaveout._util.trees import PARAM, Params, State
from leaveout.diff.hessian import Hessian
from leaveout.errors import LeaveoutWarning, MismatchError
from leaveout.task.objective import Objective
from leaveout.task.training_batch import Picked, has_shared_draws, take
from leaveout.trajectory.recorded_step import RecordedStep

LIMIT = 1000.0
"""The factor by which a vector may grow before a warning."""


class Growth:
    """The size of the vectors, step by step, in whichever direction they are carried.

    A linearised step that stretches some direction (learning rate times curvature above 2, or negative curvature)
    makes vectors grow geometrically while that lasts. What is tracked is the largest growth from a low point to a later
    high point. ``steady`` divides displacements by the number of steps that have added to them.

    The first step of an optimizer that starts without state is not a low point: Adam's is lr·g/|g|, which hardly
    depends on g, so that displacements are tiny after it and of ordinary size after the next.
    """

    def __init__(self, objective: Objective, *, steady: bool = False) -> None:
        self._objective, self._steady = objective, steady
        self._count = 0
        self._low, self._low_at = math.inf, -1
        self._most, self._from, self._to = 1.0, -1, -1

    def note(self, recorded: RecordedStep, vectors: State) -> None:
        """Note the vectors after a step (or, going backward, before it); refuse those that are not finite."""
        size = _size(vectors[PARAM])
        index = recorded.record.index
        self._count += 1
        if not math.isfinite(size):
            raise MismatchError(self._broken(recorded), code="sweep-overflow")
        if self._steady:
            size /= self._count
        if 0 < size < self._low:
            if not _starts(recorded):
                self._low, self._low_at = size, index
        elif size > self._most * self._low:
            self._most, self._from, self._to = size / self._low, self._low_at, index

    @property
    def most(self) -> float:
        """The largest growth so far, 1 or more."""
        return self._most

    @property
    def steps(self) -> tuple[int, int]:
        """The steps between which it happened, the earlier first; (-1, -1) if nothing grew."""
        first, last = sorted((self._from, self._to))
        return first, last

    def warn(self) -> None:
        """Warn about the growth so far, if it is too large."""
        if self._most > LIMIT:
            warnings.warn(f"{self._sentence()}; {REMEDY}", LeaveoutWarning, stacklevel=3)

    def _sentence(self) -> str:
        """Say where the vectors grow, and by how much."""
        first, last = self.steps
        return (
            f"From step {first} to step {last} a displacement of the parameters grows up to {self._most:.2g}-fold: the "
            "linearised run is unstable there"
        )

    def _broken(self, recorded: RecordedStep) -> str:
        """Say what made a vector overflow: an example's derivative that is not a number, or the growth so far."""
        index, cure = recorded.record.index, "use TracIn() or Replay(), or score an earlier part of the run (run.head)"
        if blamed := blame(self._objective, recorded):
            others = f", and of {len(blamed) - 1} more in its batch" if len(blamed) > 1 else ""
            return (
                f"At step {index} the derivatives of example {blamed[0]}'s loss are NaN or infinite{others}: look at "
                f"that example, {cure}."
            )
        if self._most > LIMIT:
            return f"The recurrence overflowed at step {index}. {self._sentence()}. Please {REMEDY}"
        return (
            f"At step {index} the derivative of the step is NaN or infinite, although nothing has grown before: an "
            f"example of its batch ({_some(recorded.record.ids.tolist())}) has no second derivative; {cure}."
        )


REMEDY = (
    "train with a smaller learning rate, score an earlier part of the run (run.head(steps)), or verify the scores by "
    "Replay."
)


def blame(objective: Objective, recorded: RecordedStep) -> list[int]:
    """Name the examples of a step's batch whose loss has a first or second derivative that is not finite.

    Nobody is named where the examples of a batch cannot be told apart.
    """
    if objective.coupled or has_shared_draws(recorded.batch):
        return []
    ids = recorded.record.ids.tolist()
    return [example for i, example in enumerate(ids) if not _is_smooth(objective.untraced(), recorded, i)]


def _is_smooth(objective: Objective, recorded: RecordedStep, place: int) -> bool:
    """Say whether the product that sweeps take, along ones, is finite for this example of the batch alone."""
    example = take(recorded.batch, torch.tensor([place]))
    example = example.groups[0] if isinstance(example, Picked) else example
    vector = {name: torch.ones_like(tensor)[None] for name, tensor in objective.variables(recorded.params).items()}
    curved, reads, *_ = Hessian(objective, recorded.params, example).pull(vector)
    return all(bool(torch.isfinite(tensor).all()) for tensor in (reads, *curved.values()))


def _some(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:5])) + (", ..." if len(ids) > 5 else "")


def _starts(recorded: RecordedStep) -> bool:
    """Say whether the step is a run's first, with an optimizer whose state was all zero before it."""
    if recorded.record.index > 0:
        return False
    tensors = [tensor for name, slot in recorded.before.items() if name != PARAM for tensor in slot.values()]
    return bool(tensors) and not any(bool(tensor.any()) for tensor in tensors)


def _size(params: Params) -> float:
    tensors: list[Tensor] = list(params.values())
    return float(torch.stack(torch._foreach_norm(tensors)).norm())
