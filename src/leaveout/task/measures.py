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
from torch import Tensor

from leaveout.errors import InputError

Measure: TypeAlias = str | Callable[[Any, Any], Tensor]
"""``"loss"``, ``"margin"``, ``"log_prob"``, ``"correct"``, or ``(outputs, targets) -> one number per example``."""


IGNORED = -100
"""The target of a token that does not count, as in PyTorch's losses."""


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the target's logit minus the largest other one; for a single logit of class 1, its signed value.

    The mean over the tokens that count.

    >>> margin(torch.tensor([[2.0, 5.0, 1.0]]), torch.tensor([0]))
    tensor([-3.])
    """
    return _mean(_margins(outputs, targets), targets)


def log_prob(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the log-probability of the target, with the outputs as logits; the mean over the tokens that count."""
    if outputs.ndim == targets.ndim:
        values = -F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
    else:
        values = -F.cross_entropy(outputs, targets, reduction="none", ignore_index=IGNORED)
    return _mean(values, targets)


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 where the prediction is the target, else 0; the mean over the tokens that count.

    It has no derivative: only replays can measure it.
    """
    return _mean((_margins(outputs, targets) > 0).to(outputs.dtype), targets)


def _margins(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.ndim == targets.ndim:
        return outputs * (2 * targets - 1)
    wanted = targets.masked_fill(targets == IGNORED, 0).long().unsqueeze(1)
    classes = torch.arange(outputs.shape[1], device=outputs.device).view(-1, *[1] * (targets.ndim - 1))
    others = outputs.masked_fill(classes == wanted, -torch.inf)
    return outputs.gather(1, wanted).squeeze(1) - others.amax(1)


def _mean(values: Tensor, targets: Tensor) -> Tensor:
    """Compute each example's mean over the tokens that count."""
    counts = (targets != IGNORED).expand_as(values).reshape(len(values), -1)
    return (values.reshape(len(values), -1) * counts).sum(1) / counts.sum(1).clamp(min=1)


MEASURES: dict[str, Callable[[Any, Any], Tensor]] = {"margin": margin, "log_prob": log_prob, "correct": correct}

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


def _negated(function: Callable[[Any, Any], Tensor], outputs: Any, targets: Any) -> Tensor:
    return -function(outputs, targets)


def measure_of(given: Measure) -> Callable[[Any, Any], Tensor] | None:
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
        return partial(_negated, MEASURES[given])
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
