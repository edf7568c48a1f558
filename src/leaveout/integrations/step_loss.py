"""What ``training_step`` returns, the mean loss of a batch, taken per example; and what that loss compares."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leaveout._util.trees import Params
from leaveout.errors import UnsupportedError
from leaveout.task import batches
from leaveout.task.forward import Called
from leaveout.task.losses import as_module

MEANS: frozenset[Callable] = frozenset(
    {
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.soft_margin_loss,
        F.multi_margin_loss,
        F.gaussian_nll_loss,
        F.poisson_nll_loss,
    }
)


class PerExample(TorchFunctionMode):
    """A context in which losses of ``torch.nn.functional`` are one number per example instead of the batch mean."""

    def __torch_function__(self, function: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function not in MEANS or kwargs.get("reduction", "mean") != "mean":
            return function(*args, **kwargs)
        values = function(*args, **{**kwargs, "reduction": "none"})
        return values.flatten(1).mean(1) if values.ndim > 1 else values


class Nothing(PerExample):
    """A context in which these losses are zero, so that what is added to them remains."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        value = super().__torch_function__(function, types, args, kwargs)
        return torch.zeros_like(value) if function in MEANS else value


class StepCall:
    """``(module, batch) -> (losses, targets)`` by ``module.training_step``, with logging switched off."""

    def __call__(self, module: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Call ``training_step``."""
        with PerExample():
            value = loss_of_step(module, batch)
        return value, batches.leaves(batch)[-1]


class Compared(TorchFunctionMode):
    """A context that notes what the last loss of ``torch.nn.functional`` compared, its options and its value."""

    outputs: Any = None
    targets: Any = None
    value: Any = None
    loss: Any = None

    def __torch_function__(self, function: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        value = function(*args, **(kwargs or {}))
        if function in MEANS:
            given = inspect.signature(function).bind(*args, **(kwargs or {})).arguments
            self.outputs, self.targets = given.pop("input"), given.pop("target", None)
            self.value, self.loss = value, as_module(partial(function, **given))
        return value


class StepOutputs:
    """``(module, batch) -> (outputs, targets)``: what the loss that ``module.training_step`` returns compares.

    If the step is ``penalised``, it returns that loss and a penalty, which is no part of this.
    """

    def __init__(self, penalised: bool = False) -> None:
        self._penalised = penalised

    def __call__(self, module: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Call ``training_step``."""
        with Compared() as compared:
            value = loss_of_step(module, batch)
        if value is not compared.value and not self._penalised:
            raise UnsupportedError(
                f"What {type(module).__name__}.training_step returns is the value of one loss for some batches and not "
                "for others: give task(loss=...), a loss of what the module itself returns for its inputs.",
                code="model-loss-unknown",
            )
        return compared.outputs, compared.targets


class StepPenalty:
    """``params -> number``: what ``module.training_step`` adds to the losses of a batch, whichever examples it has.

    It is asked for by way of a copy of the module, one thread at a time.
    """

    def __init__(self, module: Any, batch: Any) -> None:
        own = copy.deepcopy(module, {id(param): param for param in module.parameters()})
        own._trainer = module._trainer
        self._called, self._batch = Called(own, _rest_and_nothing), batch

    def __call__(self, params: Params) -> Tensor:
        """Call ``training_step`` with these parameters."""
        dtype = next(iter(params.values())).dtype
        tensors = [*self._called.model.named_parameters(), *self._called.model.named_buffers()]
        held = {name: batches.converted(tensor.detach(), dtype) for name, tensor in tensors}
        with ONE_AT_A_TIME:
            (rest, _), _ = self._called.pure({**held, **params}, batches.converted(self._batch, dtype), frozenset())
        return rest.mean()


ONE_AT_A_TIME = threading.Lock()


def module_of_step(module: nn.Module, batch: Any, added: Tensor | None = None) -> nn.Module | None:
    """Return the loss module whose value, and what is ``added``, ``training_step`` returns; None if it does not."""
    with Compared() as compared:
        value = loss_of_step(module, batch)
    if added is None:
        alone = value is compared.value
    else:
        alone = compared.value is not None and torch.allclose(value, compared.value + added, rtol=1e-5, atol=0)
    return compared.loss if alone and isinstance(compared.loss, nn.Module) else None


def rest_of_step(module: nn.Module, batch: Any) -> Any:
    """Return what ``training_step`` returns where the losses of examples are zero: 0 unless it adds something."""
    with Nothing():
        return loss_of_step(module, batch)


def _rest_and_nothing(module: nn.Module, batch: Any) -> tuple[Tensor, None]:
    return rest_of_step(module, batch), None


def loss_of_step(module: Any, batch: Any) -> Any:
    """Return the loss of ``training_step`` as it is; None if it skips the batch."""
    quiet = {"log": _nothing, "log_dict": _nothing}
    held = {name: module.__dict__.pop(name) for name in quiet if name in module.__dict__}
    module.__dict__.update(quiet)
    try:
        value = module.training_step(batch, 0)
    finally:
        for name in quiet:
            del module.__dict__[name]
        module.__dict__.update(held)
    return value["loss"] if isinstance(value, dict) else value


def step_losses(losses: Tensor, _targets: Any) -> Tensor:
    """Return the losses that ``StepCall`` gives in place of outputs."""
    return losses


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing, in place of a module's ``log``."""
