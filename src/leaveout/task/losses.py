"""A loss as one number per example, and the denominator by which the training loop divided their sum.

The loss of a batch is ``Σ_k s_k / D``: s_k the sum over example k's elements (tokens, pixels), D the *denominator*. The
loss of an example is its own mean ``ℓ_k = s_k / c_k`` with its count c_k (elements, unmasked tokens, class weights), so
that batch losses are ``Σ_k (c_k/D) ℓ_k``; D is Σ c_k for a mean, 1 for a sum.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from leaveout.errors import InputError

Loss: TypeAlias = Callable[[Any, Any], Any]
"""Maps ``(outputs, targets)`` to one loss per example, or to sums and counts, one of each per example."""


_MODULES: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
}


class LossParts(NamedTuple):
    """The parts of a loss.

    Attributes:
        losses: maps ``(outputs, targets)`` to ℓ_k of each example.
        counts: maps them to c_k; None if every c_k is 1 and D is the number of examples.
        summed: whether D is 1.
        by_targets: whether the counts can be computed without outputs.
    """

    losses: Callable[[Any, Any], Tensor]
    counts: Callable[[Any, Any], Tensor | None] | None = None
    summed: bool = False
    by_targets: bool = False


def call_name(loss: nn.Module | Loss) -> str:
    """Return the name of a function, or of the class of another callable.

    >>> call_name(nn.MSELoss()), call_name(taken_apart)
    ('MSELoss', 'taken_apart')
    """
    return getattr(loss, "__name__", type(loss).__name__)


def as_module(loss: nn.Module | Loss) -> nn.Module | Loss:
    """Return the module of a function of ``torch.nn.functional`` that reduces, or of a ``partial`` of it.

    >>> as_module(F.mse_loss), as_module(partial(F.cross_entropy, label_smoothing=0.1)).label_smoothing
    (MSELoss(), 0.1)
    """
    function, given = loss, {}
    if isinstance(loss, partial) and not loss.args:
        function, given = loss.func, loss.keywords
    kind = _MODULES.get(function) if callable(getattr(function, "__hash__", None)) else None
    options = {name: value for name, value in given.items() if value is not None}
    if kind is None or not options.keys() <= inspect.signature(kind).parameters.keys():
        return loss
    return loss if options.get("reduction") == "none" else kind(**options)


def taken_apart(loss: nn.Module | Loss) -> LossParts:
    """Return the parts of an ``nn`` loss module, or of a callable; they can be pickled if the loss can."""
    if not isinstance(loss, nn.modules.loss._Loss):
        return LossParts(partial(_means, loss), partial(_counted, loss))
    single = _reduced(loss, "none")
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.reduction != "none":
        counts = partial(_class_counts, loss)
        return LossParts(partial(_class_losses, loss, single), counts, loss.reduction == "sum", by_targets=True)
    if isinstance(loss, nn.KLDivLoss) and loss.reduction == "batchmean":
        return LossParts(partial(_row_sums, single))
    if loss.reduction != "sum":
        return LossParts(partial(_row_means, single))
    return LossParts(partial(_row_means, single), partial(_row_lengths, single), summed=True)


def _row_sums(single: Any, outputs: Any, targets: Any) -> Tensor:
    return single(outputs, targets).flatten(1).sum(1)


def _row_means(single: Any, outputs: Any, targets: Any) -> Tensor:
    values = single(outputs, targets)
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def _row_lengths(single: Any, outputs: Any, targets: Any) -> Tensor:
    values = single(outputs, targets)
    return torch.full_like(values.flatten(1)[:, 0] if values.ndim > 1 else values, values[0].numel())


def _class_counts(loss: Any, outputs: Any, targets: Any) -> Tensor:
    """Count the targets of cross-entropy and the like by their class weights, without ``ignore_index``."""
    if targets.is_floating_point():  # class probabilities, in the second dimension
        return targets.new_full((len(targets),), targets[0].numel() / targets.shape[1])
    kept = targets != loss.ignore_index
    weight = kept.to(torch.get_default_dtype() if outputs is None else outputs.dtype)
    if loss.weight is not None:
        weight = torch.where(kept, loss.weight[torch.where(kept, targets, 0)], 0)
    return weight.reshape(len(weight), -1).sum(1)


def _class_losses(loss: Any, single: Any, outputs: Any, targets: Any) -> Tensor:
    outputs, targets = classes_second(outputs, targets)
    values = single(outputs, targets)
    sums = values.reshape(len(values), -1).sum(1)
    if values.ndim == 1 and loss.weight is None:  # one element, whose loss is 0 if it is masked
        return values
    number = _class_counts(loss, outputs, targets).detach()
    return sums / torch.where(number > 0, number, 1)


def classes_second(outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Move classes to dimension 1, as PyTorch wants, in (examples, tokens, classes) outputs of language models."""
    tokens = isinstance(outputs, Tensor) and outputs.ndim == 3 and targets.ndim == 2
    if tokens and outputs.shape[1] == targets.shape[1] and outputs.shape[2] != targets.shape[1]:
        return outputs.transpose(1, 2), targets
    return outputs, targets


def _reduced(loss: nn.Module, reduction: str) -> Any:
    single = copy.copy(loss)
    single.reduction = reduction  # type: ignore[assignment]
    return single


def _means(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    values = loss(outputs, targets)
    if not isinstance(values, tuple):
        return values
    sums, counts = _pair(values)
    return sums / torch.where(counts > 0, counts, 1).detach()


def _counted(loss: Loss, outputs: Any, targets: Any) -> Tensor | None:
    values = loss(outputs, targets)
    return _pair(values)[1].detach() if isinstance(values, tuple) else None


def _pair(values: tuple) -> tuple[Tensor, Tensor]:
    if len(values) != 2 or not all(isinstance(value, Tensor) for value in values):
        raise InputError(
            "The loss returned a tuple that is not (sums, counts): return one loss per example, or two tensors, each "
            "example's summed loss and what it counts in the denominator.",
            code="loss-parts-wrong",
        )
    return values
