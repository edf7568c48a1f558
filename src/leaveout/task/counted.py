"""Losses of single examples times what they count in training, for methods that read them outside recorded batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leaveout._util.trees import Params
from leaveout.task.task import Task


def per_count(task: Task, params: Params, size: int) -> Task:
    """Return the same task with the losses ℓ_k·c_k/c̄, whose mean is the training loss over all examples.

    The training loss of a batch is Σ c_k ℓ_k / Σ c_k, with counts c_k such as class weights or unmasked tokens; c̄ is
    their mean over all examples. If it is a plain sum, Σ c_k ℓ_k, the mean is that over batches of the given size, so
    that c̄ = 1/size. The L2 term of an example is not counted.
    """
    objective = task.objective
    counts, losses = objective.parts.counts, objective.parts.losses
    if not objective.counted or counts is None:
        return task
    mean = 1 / size if objective.parts.summed else _mean_count(task, params, size)

    def counted(outputs: Any, targets: Any) -> Tensor:
        number = counts(outputs, targets)
        values = losses(outputs, targets)
        return values if number is None else values * number.to(values) / mean

    return task.of(objective.counting(objective.parts._replace(losses=counted)))


@torch.no_grad()
def _mean_count(task: Task, params: Params, size: int) -> float:
    """Return c̄."""
    counts, total = task.objective.parts.counts, 0.0
    assert counts is not None  # noqa: S101 - checked before
    for start in range(0, task.size, size):
        number = counts(*task.objective.outputs(params, task.read(range(start, min(start + size, task.size)))))
        assert number is not None  # noqa: S101 - the task is counted
        total += float(number.sum())
    return total / task.size
