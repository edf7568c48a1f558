"""Outputs read as class scores, and targets as labels, if the loss shows that they are."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leaveout.errors import InputError

TINY = 1e-12
"""Probabilities are clamped this far from 0 and 1 before their logarithm is taken."""


class Reading(Enum):
    """What the outputs of a classifier are."""

    CLASSES = "a row of logits or log-probabilities, one per class"
    LOGIT = "one logit, of class 1"
    PROBABILITY = "one probability, of class 1"


def readings(outputs: Tensor, targets: Any, losses: Float[Tensor, " n"]) -> set[Reading]:
    """Return how these outputs can be read; the empty set if they are not class scores.

    Whole targets from 0 on and a row of outputs per example are classes. One output per example and targets 0 and 1
    are two classes if the loss is −log of what the sigmoid of the output, or the output itself, gives the target.

    >>> z, y = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0])
    >>> readings(z, y, torch.nn.functional.softplus(-z))
    {<Reading.LOGIT: 'one logit, of class 1'>}
    """
    count = len(losses)
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.numel() != count:
        return set()
    targets = targets.flatten()
    whole = not targets.is_floating_point() and targets.dtype != torch.bool
    if whole and outputs.ndim == 2 and outputs.shape[1] > 1:
        inside = int(targets.min()) >= 0 and int(targets.max()) < outputs.shape[1]
        return {Reading.CLASSES} if inside else set()
    if outputs.numel() != count or not bool(((targets == 0) | (targets == 1)).all()):
        return set()
    z, own = outputs.flatten().double(), torch.exp(-losses.double())
    chances = {Reading.LOGIT: z.sigmoid(), Reading.PROBABILITY: z}
    return {
        reading
        for reading, chance in chances.items()
        if torch.allclose(torch.where(targets == 1, chance, 1 - chance), own, atol=1e-4)
    }


def class_logits(reading: Reading, outputs: Tensor) -> Float[Tensor, "n classes"]:
    """Return the outputs as logits whose softmax is the model's distribution over the classes, in float64.

    >>> class_logits(Reading.PROBABILITY, torch.tensor([0.75])).softmax(1)
    tensor([[0.2500, 0.7500]], dtype=torch.float64)
    """
    if reading is Reading.CLASSES:
        return outputs.double()
    z = outputs.flatten().double()
    if reading is Reading.PROBABILITY:
        z = z.clamp(TINY, 1 - TINY).logit()
    return torch.stack([torch.zeros_like(z), z], dim=1)


def own_probability(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the probability of each example's own label."""
    return logits.softmax(1).gather(1, labels[:, None])[:, 0]


def margins(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Subtract the highest logit of another class from that of each example's label: negative means misclassified.

    >>> margins(torch.tensor([[1.0, 4.0, 2.0], [3.0, 0.0, 2.5]]), torch.tensor([1, 2]))
    tensor([ 2.0000, -0.5000])
    """
    own = labels[:, None]
    others = logits.scatter(1, own, -torch.inf)
    return (logits.gather(1, own) - others.max(1, keepdim=True).values)[:, 0]


IGNORED = -100
"""The target of examples that PyTorch's losses pass over."""


def labelled(outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return targets with the predicted class in place of those that are passed over, and where; None if nowhere.

    >>> labelled(torch.tensor([[1.0, 2.0], [0.0, 3.0]]), torch.tensor([0, -100]))
    (tensor([0, 1]), tensor([False,  True]))
    """
    rows = isinstance(outputs, Tensor) and outputs.ndim == 2 and isinstance(targets, Tensor)
    if not rows or targets.is_floating_point() or targets.shape != outputs.shape[:1]:
        return targets, None
    ignored = targets == IGNORED
    return (torch.where(ignored, outputs.argmax(1), targets), ignored) if ignored.any() else (targets, None)


def label_numbers(targets: Tensor) -> Int[Tensor, " n"]:
    """Return the targets of a classifier as class numbers."""
    return targets.flatten().long()


def class_names(numbers: Int[Tensor, " n"], classes: Sequence[str]) -> list[str]:
    """Return the classes' names, or their numbers if they have no names.

    >>> class_names(torch.tensor([1, 0]), ("cat", "dog")), class_names(torch.tensor([1]), ())
    (['dog', 'cat'], ['1'])
    """
    if classes and int(numbers.max()) >= len(classes):
        raise InputError(
            f"Class {int(numbers.max())} occurs, and classes= has {len(classes)} names: name every class, from 0 on.",
            code="class-without-name",
        )
    return [str(classes[i]) if classes else str(i) for i in numbers.tolist()]
