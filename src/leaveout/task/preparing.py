"""Batches made ready as training saw them: random draws noted in an eager pass, denominators counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from leaveout._util.trees import Params
from leaveout.errors import UnsupportedError
from leaveout.task import batches
from leaveout.task.batches import Batch
from leaveout.task.draws import Draws, RandomState, has_randomness, note
from leaveout.task.example_draws import by_example, example_axes
from leaveout.task.forward import default_forward, default_targets
from leaveout.task.training_batch import TrainingBatch, Window

if TYPE_CHECKING:
    from leaveout.task.task import Task

TRIAL = 3
"""How many examples a trial takes; of a large model, one less."""

LARGE = 1 << 24
"""From how many parameters on, frozen ones too, a model is large: a pass in float64 takes half a second or more."""


class MicroBatch(NamedTuple):
    """What is recorded of one micro-batch of a step.

    Attributes:
        batch: what the loader yielded.
        random: the states of the random generators before its forward pass; None where that drew nothing.
        denominator: what its loss was divided by, where that is not to be found out.
    """

    batch: Batch
    random: RandomState | None = None
    denominator: float | None = None


def prepared(task: Task, parts: Sequence[MicroBatch], params: Params) -> TrainingBatch | Window:
    """Return a step's micro-batches with their draws and scales |Z|/D."""
    noted = [_noted(task, part, params) for part in parts]
    sizes = [len(batches.leaves(part.batch)[0]) for part in parts]
    own = [
        (1.0 if task.parts.summed else float(size if counts is None else counts.sum()))
        for size, (_, counts) in zip(sizes, noted, strict=True)
    ]
    factor = _factors(task.accumulation, own)
    total = sum(sizes)
    ready = []
    for part, (draws, counts), value, times in zip(parts, noted, own, factor, strict=True):
        denominator = value * times if part.denominator is None else part.denominator
        batch = _with_draws(task, part.batch, draws, params)
        ready.append(batch._replace(scale=_scale(part.batch, counts, total / denominator, params)))
    return ready[0] if len(ready) == 1 else Window(tuple(ready))


def _factors(accumulation: str | int, own: list[float]) -> list[float]:
    """Return how many times its own denominator each micro-batch's loss was divided by.

    >>> _factors("mean", [4.0, 2.0]), _factors("window", [4.0, 2.0]), _factors(3, [4.0, 2.0])
    ([2.0, 2.0], [1.5, 3.0], [3.0, 3.0])
    """
    if accumulation == "window":
        return [sum(own) / value for value in own]
    times = {"mean": len(own), "sum": 1}.get(str(accumulation), accumulation)
    return [float(times)] * len(own)


def is_large(task: Task) -> bool:
    """Say whether passes of a task's model take so long that as few as can be are made to compare derivatives."""
    return sum(param.numel() for param in task.model.parameters()) >= LARGE


def trial_ids(task: Task) -> list[int]:
    """Return the first training examples, on which derivatives are compared."""
    return list(range(min(TRIAL - is_large(task), task.size)))


def trial_batch(task: Task, params: Params) -> TrainingBatch:
    """Return the first training examples as training would see them, with draws from a fixed seed."""
    batch = task.read(trial_ids(task))
    state = {"cpu": torch.Generator().manual_seed(0).get_state()}
    random = has_randomness(lambda: _eager(task, batch, params), task.device)
    ready = prepared(task, [MicroBatch(batch, state if random else None)], params)
    assert isinstance(ready, TrainingBatch)  # noqa: S101 - one micro-batch
    return ready


def _noted(task: Task, part: MicroBatch, params: Params) -> tuple[Draws, Tensor | None]:
    """What the forward pass drew, and what each example counts in the denominator; None where each counts one."""
    counts: list[Tensor | None] = [None]
    needed = task.counted and task.parts.counts is not None
    if part.random is None:
        if needed:
            counts[0] = _counts(task, part.batch, params)
        return {}, counts[0]

    def forward() -> None:
        both = _eager(task, part.batch, params)
        if needed and task.parts.counts is not None:
            counts[0] = task.parts.counts(*both)

    return note(forward, part.random), counts[0]


def _counts(task: Task, batch: Batch, params: Params) -> Tensor | None:
    assert task.parts.counts is not None  # noqa: S101 - asked before
    if task.parts.by_targets and task.called.rule is default_forward:
        return task.parts.counts(None, default_targets(batch))
    return task.parts.counts(*_eager(task, batch, params))


@torch.no_grad()
def _eager(task: Task, batch: Batch, params: Params) -> tuple[Tensor, Any]:
    """A forward pass in the modes of training, which leaves the model's buffers as they are."""
    held = {name: params.get(name, buffer).clone() for name, buffer in task.model.named_buffers()}
    return task.called.pure({**params, **held}, batch, task.training)[0]


def _with_draws(task: Task, batch: Batch, draws: Draws, params: Params) -> TrainingBatch:
    """The batch with its draws cut by example, or whole where they cannot be."""
    if not draws:
        return TrainingBatch(batch)
    names, count = tuple(draws), len(batches.leaves(batch)[0])
    if names not in task.axes and count > 1:
        try:
            rows = _rows(task, params)
            # Whose draw is where in a packed batch depends on its lengths.
            whole = task.coupled or task.called.packs
            task.axes[names] = None if whole else example_axes(rows, batch, draws)
        except UnsupportedError:
            task.axes[names] = None
    axes = task.axes.get(names)
    if axes is None:
        return TrainingBatch(batch, whole=draws)
    return TrainingBatch(batch, by_example(draws, axes, count))


def _rows(task: Task, params: Params) -> Any:
    return lambda batch: task.parts.losses(*_eager(task, batch, params))


def _scale(batch: Batch, counts: Tensor | None, factor: float, params: Params) -> Any:
    """|Z| c/D of each example; nothing where it is 1 for all."""
    like = next(iter(params.values()))
    scale = like.new_full((len(batches.leaves(batch)[0]),), factor) if counts is None else counts.to(like) * factor
    return () if torch.allclose(scale, torch.ones_like(scale), rtol=1e-12, atol=0) else scale
