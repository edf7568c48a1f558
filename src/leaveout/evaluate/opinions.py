"""The trained model's predictions for examples: label, predicted class, probability of the label, loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset

from leaveout._util.trees import Params
from leaveout.compute.resources import Resources
from leaveout.task.classes import Reading, class_logits, class_names, label_numbers, labelled, own_probability, readings
from leaveout.task.task import Task

BLOCK = 512
GUESSED = 0.02
"""How much better than the most frequent class a model must be on the training labels to have learned something."""
LITTLE = 0.6
"""The share of its training labels that a model should predict before its mistakes are worth examining."""


@dataclass(frozen=True)
class Opinions:
    """One entry per example; ``labels`` and ``says`` are empty, ``p`` is None, if outputs are not class scores."""

    labels: list[str]
    says: list[str]
    p: Float[Tensor, " examples"] | None
    losses: Float[Tensor, " examples"]

    @property
    def right(self) -> float:
        """The share of the labels that the model predicts."""
        return sum(a == b for a, b in zip(self.labels, self.says, strict=True)) / len(self.labels)

    @property
    def failed(self) -> bool:
        """Whether a classifier predicts these labels, those of its training, no better than their most frequent one."""
        return self.p is not None and self.right < self._guessed + GUESSED

    @property
    def weakness(self) -> str:
        """What scores and labels are worth if a classifier has not learned its training labels; else nothing."""
        if self.p is None or self.right >= max(LITTLE, self._guessed + GUESSED):
            return ""
        if self.right >= self._guessed + GUESSED:
            return (
                f"The model is right for only {self.right:.1%} of its training labels. Labels and scores will be about "
                "this model: train longer, or with another learning rate, first."
            )
        return (
            f"The training failed: guessing the most frequent class is right for {self._guessed:.1%} of the labels. "
            "Scores would explain a model that has learned nothing: try another learning rate, or more epochs."
        )

    @property
    def _guessed(self) -> float:
        return Counter(self.labels).most_common(1)[0][1] / len(self.labels)


def opinions(
    task: Task, params: Params, dataset: Dataset, ids: Sequence[int], classes: Sequence[str], resources: Resources
) -> Opinions:
    """Evaluate the final model on these examples.

    If its outputs are class scores (``task.classes``), there is a predicted class and a probability of the label; a
    single output per example that is not a class score is a number.
    """
    starts = range(0, len(ids), BLOCK)
    allowed, blocks, values = set(Reading), [], []
    for start in resources.track(starts, len(starts), "asking the model"):
        batch = task.read(ids[start : start + BLOCK], dataset)
        with torch.no_grad():
            outputs, targets = task.objective.outputs(params, batch)
            values.append(task.objective.output_losses(outputs, targets))
        targets, _ = labelled(outputs, targets)
        here = readings(outputs, targets, values[-1])
        allowed &= here
        blocks.append(_compact(outputs, targets, len(values[-1]), here))
    losses = torch.cat(values).double().cpu()
    if any(block is None for block in blocks):
        return Opinions([], [], None, losses)
    table = torch.cat([block for block in blocks if block is not None]).cpu()
    if not allowed:
        return Opinions([_number(t) for t in table[:, 0]], [_number(z) for z in table[:, 1]], None, losses)
    labels = label_numbers(table[:, 0])
    if Reading.CLASSES in allowed:
        choice, p = table[:, 1].long(), table[:, 2]
    else:
        reading = Reading.LOGIT if Reading.LOGIT in allowed else Reading.PROBABILITY
        logits = class_logits(reading, table[:, 1])
        choice, p = logits.argmax(1), own_probability(logits, labels)
    return Opinions(class_names(labels, classes), class_names(choice, classes), p, losses)


def _compact(outputs: Tensor, targets: Any, count: int, allowed: set[Reading]) -> Tensor | None:
    """Keep a few numbers per example: target and output, or for classes the predicted class and the label's p."""
    if Reading.CLASSES in allowed:
        labels, logits = label_numbers(targets), class_logits(Reading.CLASSES, outputs)
        return torch.stack([labels.double(), logits.argmax(1).double(), own_probability(logits, labels)], dim=1)
    both = isinstance(targets, Tensor) and isinstance(outputs, Tensor)
    if both and targets.numel() == outputs.numel() == count:
        return torch.stack([targets.flatten().double(), outputs.flatten().double()], dim=1)
    return None


def _number(value: Tensor) -> str:
    return f"{float(value):.4g}"
