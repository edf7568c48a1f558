"""What is measured of a query, if not the training loss: a number per query example, from outputs and targets.

Scores are positive if an example helped. For the loss, and for a user-defined function, the score is how much it rises
without the example; for measures where higher is better, how much they fall.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from leaveout.errors import InputError, UnsupportedError
from leaveout.task.classes import Reading, readings
from leaveout.task.losses import classes_second

Measure: TypeAlias = str | Callable[[Any, Any], Tensor]
"""``"loss"``, ``"margin"``, ``"log_prob"``, ``"correct"``, or ``(outputs, targets) -> one number per example``."""


OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiMarginLoss,
              nn.MultiLabelSoftMarginLoss)  # fmt: skip
"""The losses of classifiers."""

IGNORED = -100
"""The target of a token that does not count, as in PyTorch's losses."""


def margin(outputs: Tensor, targets: Tensor, ignored: int = IGNORED) -> Tensor:
    """Compute the target's logit minus the largest other one; for a single logit of class 1, its signed value.

    The mean over the tokens that count.

    >>> margin(torch.tensor([[2.0, 5.0, 1.0]]), torch.tensor([0]))
    tensor([-3.])
    """
    return _mean(_margins(outputs, targets, ignored), targets, ignored)


def log_prob(outputs: Tensor, targets: Tensor, ignored: int = IGNORED) -> Tensor:
    """Compute the log-probability of the target, with the outputs as logits; the mean over the tokens that count."""
    if outputs.ndim == targets.ndim:
        values = -F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
    else:
        values = -F.cross_entropy(outputs, targets, reduction="none", ignore_index=ignored)
    return _mean(values, targets, ignored)


def correct(outputs: Tensor, targets: Tensor, ignored: int = IGNORED) -> Tensor:
    """Return 1 where the prediction is the target, else 0; the mean over the tokens that count.

    It has no derivative: only replays can measure it.
    """
    return _mean((_margins(outputs, targets, ignored) > 0).to(outputs.dtype), targets, ignored)


def as_logits(loss: Any, outputs: Any, targets: Any) -> tuple[Any, Any, int]:
    """Return outputs as logits with classes in dimension 1, the targets they belong to, and the target that is ignored.

    As the loss reads them: language models' outputs have classes last, and may be one token ahead of their targets;
    those of ``BCELoss`` are probabilities.

    >>> as_logits(nn.BCELoss(), torch.tensor([[0.5]]), torch.tensor([[1.0]]))[0]
    tensor([[0.]])
    """
    shift = getattr(loss, "shift", None)
    if shift is not None and outputs.ndim == 3:  # the loss of a Hugging Face model
        outputs, targets = (outputs[:, :-1], targets[:, 1:]) if shift else (outputs, targets)
        return outputs.transpose(1, 2), targets, IGNORED
    if isinstance(loss, nn.BCELoss):
        outputs = outputs.logit(torch.finfo(outputs.dtype).eps)
    return (*classes_second(outputs, targets), getattr(loss, "ignore_index", IGNORED))


def _margins(outputs: Tensor, targets: Tensor, ignored: int) -> Tensor:
    if outputs.ndim == targets.ndim:
        return outputs * (2 * targets - 1)
    wanted = targets.masked_fill(targets == ignored, 0).long().unsqueeze(1)
    classes = torch.arange(outputs.shape[1], device=outputs.device).view(-1, *[1] * (targets.ndim - 1))
    others = outputs.masked_fill(classes == wanted, -torch.inf)
    return outputs.gather(1, wanted).squeeze(1) - others.amax(1)


def _mean(values: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """Compute each example's mean over the tokens that count."""
    counts = (targets != ignored).expand_as(values).reshape(len(values), -1)
    return (values.reshape(len(values), -1) * counts).sum(1) / counts.sum(1).clamp(min=1)


MEASURES: dict[str, Callable[[Any, Any, int], Tensor]] = {"margin": margin, "log_prob": log_prob, "correct": correct}

UNITS = {"margin": "fall of the query margin", "log_prob": "fall of the query log-probability",
         "correct": "fall of the share of queries that are right"}  # fmt: skip
OWN = "change of the query measure"

FLAT = ("correct",)
"""Measures without a derivative."""


def unit_of(measure: Measure) -> str | None:
    """Return the unit of a measure's scores; None for the loss."""
    if measure == "loss":
        return None
    return UNITS[measure] if isinstance(measure, str) else OWN


def _negated(function: Callable[[Any, Any, int], Tensor], loss: Any, outputs: Any, targets: Any) -> Tensor:
    return -function(*as_logits(loss, outputs, targets))


def check_classes(measure: Measure, loss: Any, outputs: Any, targets: Any, losses: Tensor) -> None:
    """Refuse a measure of class scores where outputs, targets and losses of an example show that there are none."""
    if not isinstance(measure, str) or measure == "loss":
        return
    other = isinstance(loss, nn.modules.loss._Loss) and not isinstance(loss, OF_CLASSES)
    tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    if not other and tensors and targets.is_floating_point():
        soft = isinstance(loss, nn.CrossEntropyLoss) or not bool(((targets == 0) | (targets == 1)).all())
        read = {Reading.LOGIT, Reading.PROBABILITY} & readings(outputs, targets, losses)
        other = soft or (read == {Reading.PROBABILITY} and not isinstance(loss, nn.BCELoss))
    if other or not tensors:
        raise UnsupportedError(
            f"measure={measure!r} is of logits and of targets that are class numbers (or 0 and 1), and the loss does "
            "not show that these are: give a function (outputs, targets) -> one number per example.",
            code="measure-needs-classes",
        )


def measure_of(given: Measure, loss: Any = None) -> Callable[[Any, Any], Tensor] | None:
    """Return the function that rises when a query does worse; None for the loss."""
    if given == "loss":
        return None
    if isinstance(given, str):
        if given not in MEASURES:
            names = ", ".join(map(repr, ("loss", *MEASURES)))
            raise InputError(
                f"measure={given!r} is unknown: use one of {names}, or a function (outputs, targets) -> one number per "
                "example.",
                code="measure-unknown",
            )
        return partial(_negated, MEASURES[given], loss)
    if not callable(given):
        raise InputError(
            f"measure={given!r} is not a function (outputs, targets) -> one number per example.", code="measure-unknown"
        )
    return partial(_each, given)


def _each(function: Callable[[Any, Any], Tensor], outputs: Any, targets: Any) -> Tensor:
    """Call a user's measure and check its shape; returning one number for all queries is an easy mistake."""
    values = function(outputs, targets)
    if not isinstance(values, Tensor) or values.ndim != 1:
        shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(
            f"measure= returned {shape} instead of one number per example: return a tensor with one dimension, without "
            "a mean over the examples.",
            code="measure-not-per-example",
        )
    return values
