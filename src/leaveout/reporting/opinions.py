"""What the trained model says of examples: their labels, its own choice, the probability of the label, the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset

from leaveout._util.trees import Params
from leaveout.compute.resources import Resources
from leaveout.errors import InputError
from leaveout.task.task import Task

BLOCK = 512


@dataclass(frozen=True)
class Opinions:
    """One entry an example; ``labels`` and ``says`` are empty, and ``p`` None, where the outputs are no such thing."""

    labels: list[str]
    says: list[str]
    p: Float[Tensor, " examples"] | None
    losses: Float[Tensor, " examples"]


@dataclass(frozen=True)
class _Block:
    outputs: Tensor
    targets: Any
    losses: Tensor


def opinions(
    task: Task, params: Params, dataset: Dataset, ids: Sequence[int], classes: Sequence[str], resources: Resources
) -> Opinions:
    """The final model on these examples.

    Integer targets and a row of outputs are classes; one output and targets 0 and 1 are two classes if the loss is
    −log of what the sigmoid (or the output itself) gives the target; one output otherwise is a number.
    """
    starts = range(0, len(ids), BLOCK)
    parts = []
    for start in resources.track(starts, len(starts), "asking the model"):
        batch = task.read(ids[start : start + BLOCK], dataset)
        with torch.no_grad():
            outputs, targets = task.outputs(params, batch)
            parts.append(_summed(outputs, targets, task.output_losses(outputs, targets)))
    losses = torch.cat([part.losses for part in parts])
    if any(part.targets is None for part in parts):
        return Opinions([], [], None, losses)
    outputs, targets = torch.cat([part.outputs for part in parts]), torch.cat([part.targets for part in parts])
    if outputs.ndim == 2:  # (choice, probability of the label)
        choice = outputs[:, 0].long()
        return Opinions(_names(targets, classes), _names(choice, classes), outputs[:, 1], losses)
    sure = _probability(outputs, targets, losses)
    if sure is None:
        return Opinions([_number(t) for t in targets], [_number(z) for z in outputs], None, losses)
    own = torch.where(targets == 1, sure, 1 - sure)
    return Opinions(_names(targets.long(), classes), _names((sure > 0.5).long(), classes), own, losses)


def _summed(outputs: Tensor, targets: Any, losses: Tensor) -> _Block:
    """What is kept of a block: two numbers an example for classes, one where the model gives one."""
    outputs, losses = outputs.double().cpu(), losses.double().cpu()
    if not isinstance(targets, Tensor) or targets.numel() != len(losses):
        return _Block(outputs, None, losses)
    targets = targets.flatten().cpu()
    whole = not targets.is_floating_point() and targets.dtype != torch.bool
    if whole and outputs.ndim == 2 and outputs.shape[1] > 1 and int(targets.min()) >= 0:
        own = outputs.softmax(1).gather(1, targets.long()[:, None])[:, 0]  # of log-probabilities as of logits
        return _Block(torch.stack([outputs.argmax(1).double(), own], dim=1), targets.long(), losses)
    if outputs.numel() == len(losses):
        return _Block(outputs.flatten(), targets.double(), losses)
    return _Block(outputs, None, losses)


def _probability(outputs: Tensor, targets: Tensor, losses: Tensor) -> Tensor | None:
    """The probability of class 1, where the loss shows how the outputs tell it."""
    if not bool(((targets == 0) | (targets == 1)).all()):
        return None
    for sure in (outputs.sigmoid(), outputs):
        own = torch.where(targets == 1, sure, 1 - sure)
        if torch.allclose(own, torch.exp(-losses), atol=1e-4):
            return sure
    return None


def _names(numbers: Tensor, classes: Sequence[str]) -> list[str]:
    if classes and int(numbers.max()) >= len(classes):
        raise InputError(
            f"Class {int(numbers.max())} occurs, and classes= has {len(classes)} names: name every class, from 0 on.",
            code="class-without-name",
        )
    return [str(classes[i]) if classes else str(i) for i in numbers.tolist()]


def _number(value: Tensor) -> str:
    return f"{float(value):.4g}"
