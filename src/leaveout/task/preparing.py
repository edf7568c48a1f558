"""Prepares batches as training saw them: random draws noted in an eager pass, denominators counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leaveout._util.generators import RandomState
from leaveout._util.trees import Params
from leaveout.errors import UnsupportedError
from leaveout.task import batches
from leaveout.task.batches import Batch
from leaveout.task.draws import Draws, has_randomness, note
from leaveout.task.example_draws import Axes, by_example, example_axes
from leaveout.task.forward import default_forward, default_targets
from leaveout.task.objective import Objective
from leaveout.task.training_batch import TrainingBatch, Window

TRIAL = 3
"""How many examples a trial uses; one less for a large model."""

LARGE = 1 << 24
"""A model with this many parameters, including frozen ones, is large: a float64 pass takes half a second or more."""


class MicroBatch(NamedTuple):
    """The record of one micro-batch of a step.

    Attributes:
        batch: what the loader yielded.
        random: the states of the random generators before its forward pass; None if it drew no random numbers.
        denominator: what its loss was divided by, if it is known and need not be computed; infinite for a batch that
            was passed over after its forward pass had moved the model's buffers.
    """

    batch: Batch
    random: RandomState | None = None
    denominator: float | None = None


def prepared(objective: Objective, parts: Sequence[MicroBatch], params: Params) -> TrainingBatch | Window:
    """Return a step's micro-batches with their draws and scales |Z|/D."""
    noted = [_noted(objective, part, params) for part in parts]
    sizes = [len(batches.leaves(part.batch)[0]) for part in parts]
    own = [
        (1.0 if objective.parts.summed else float(size if counts is None else counts.sum()))
        for size, (_, counts) in zip(sizes, noted, strict=True)
    ]
    used = [value for value, part in zip(own, parts, strict=True) if part.denominator != math.inf]
    times = iter(_factors(objective.accumulation, used))
    total = sum(sizes)
    ready = []
    for part, (draws, counts), value in zip(parts, noted, own, strict=True):
        factor = 1.0 if part.denominator == math.inf else next(times)
        denominator = value * factor if part.denominator is None else part.denominator
        batch = _with_draws(objective, part.batch, draws, params)
        ready.append(batch._replace(scale=_scale(part.batch, counts, total / denominator, params)))
    return ready[0] if len(ready) == 1 else Window(tuple(ready))


def _factors(accumulation: str | int, own: list[float]) -> list[float]:
    """Return, for each micro-batch, what its loss was divided by, as a multiple of its own denominator.

    >>> _factors("mean", [4.0, 2.0]), _factors("window", [4.0, 2.0]), _factors(3, [4.0, 2.0])
    ([2.0, 2.0], [1.5, 3.0], [3.0, 3.0])
    """
    if accumulation == "window":
        return [sum(own) / value for value in own]
    times = {"mean": len(own), "sum": 1}.get(str(accumulation), accumulation)
    return [float(times)] * len(own)


def is_large(objective: Objective) -> bool:
    """Say whether the model's passes are so slow that derivatives are compared with as few passes as possible."""
    return sum(param.numel() for param in objective.model.parameters()) >= LARGE


def trial_ids(objective: Objective, among: Sequence[int]) -> list[int]:
    """Draw the training examples on which derivatives are compared, with a fixed seed."""
    return sorted(Random(0).sample(among, min(TRIAL - is_large(objective), len(among))))  # noqa: S311 - no secret


def trial_batch(objective: Objective, params: Params, batch: Batch) -> TrainingBatch:
    """Return some training examples as training would see them, with draws from a fixed seed."""
    state = {"cpu": torch.Generator().manual_seed(0).get_state()}
    random = has_randomness(lambda: _eager(objective, batch, params), objective.device)
    ready = prepared(objective, [MicroBatch(batch, state if random else None)], params)
    assert isinstance(ready, TrainingBatch)  # noqa: S101 - one micro-batch
    return ready


def _noted(objective: Objective, part: MicroBatch, params: Params) -> tuple[Draws, Tensor | None]:
    """Return what the forward pass drew, and each example's count in the denominator; None if every count is one."""
    counts: list[Tensor | None] = [None]
    needed = objective.counted and objective.parts.counts is not None
    if part.random is None:
        if needed:
            counts[0] = _counts(objective, part.batch, params)
        return {}, counts[0]

    def forward() -> None:
        both = _eager(objective, part.batch, params)
        if needed and objective.parts.counts is not None:
            counts[0] = objective.parts.counts(*both)

    return note(forward, part.random), counts[0]


def _counts(objective: Objective, batch: Batch, params: Params) -> Tensor | None:
    assert objective.parts.counts is not None  # noqa: S101 - checked before
    if objective.parts.by_targets and objective.called.rule is default_forward:
        return objective.parts.counts(None, default_targets(batch))
    return objective.parts.counts(*_eager(objective, batch, params))


@torch.no_grad()
def _eager(objective: Objective, batch: Batch, params: Params) -> tuple[Tensor, Any]:
    """Do a forward pass in the modes of training that leaves the model's buffers unchanged."""
    held = {name: params.get(name, buffer).clone() for name, buffer in objective.model.named_buffers()}
    return objective.called.pure({**params, **held}, batch, objective.mode.training)[0]


def _with_draws(objective: Objective, batch: Batch, draws: Draws, params: Params) -> TrainingBatch:
    """Return the batch with its draws split by example, or whole if they cannot be split."""
    if not draws:
        return TrainingBatch(batch)
    count = len(batches.leaves(batch)[0])

    def found() -> Axes | None:
        # In a packed batch, which draw belongs to which example depends on the lengths.
        if objective.coupled or objective.called.packs:
            return None
        try:
            return example_axes(lambda one: objective.parts.losses(*_eager(objective, one, params)), batch, draws)
        except UnsupportedError:
            return None

    memory, question = objective.execution.memory, objective.axes_question(draws)
    axes = memory.recall(question, found) if count > 1 else memory.known(question)
    if axes is None:
        return TrainingBatch(batch, whole=draws)
    return TrainingBatch(batch, by_example(draws, axes, count))


def _scale(batch: Batch, counts: Tensor | None, factor: float, params: Params) -> Any:
    """Return |Z| c/D of each example; an empty tuple if it is 1 for all."""
    like = next(iter(params.values()))
    scale = like.new_full((len(batches.leaves(batch)[0]),), factor) if counts is None else counts.to(like) * factor
    return () if torch.allclose(scale, torch.ones_like(scale), rtol=1e-12, atol=0) else scale
