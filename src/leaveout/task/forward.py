"""The model called as a pure function of its parameters, with any forward rule and any modules in training mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from leaveout._util.trees import Params
from leaveout._util.wrappers import ORIGINAL, casts_itself
from leaveout.errors import InputError
from leaveout.task import batches
from leaveout.task.batches import Batch
from leaveout.task.rewrites.missing_rules import Batched, plain_attention
from leaveout.task.rewrites.own_functions import transformable
from leaveout.task.rewrites.whole_masks import whole_masks

Forward: TypeAlias = Callable[[nn.Module, Batch], tuple[Tensor, Any]]

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


def uncast(model: nn.Module) -> nn.Module:
    """Return a model that shares everything with this one but the autocasting that accelerate added to ``forward``.

    The run records the autocasting it was trained with, and derivatives are taken without it. Outputs are float32, as
    they are with accelerate.
    """
    if not casts_itself(model):
        return model
    plain = copy.copy(model)
    original = vars(plain).pop(ORIGINAL)
    plain.forward = MethodType(_WideOutputs(original.__func__), plain)
    return plain


class _WideOutputs:
    """A ``forward`` whose 16-bit outputs are converted to 32 bits."""

    def __init__(self, forward: Callable) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._forward(*args, **kwargs)
        return tree_map_only(Tensor, _wide, outputs)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class Called(nn.Module):
    """A model with its forward rule, so that ``functional_call`` can swap parameters under any user-defined rule."""

    def __init__(self, model: nn.Module, rule: Forward) -> None:
        super().__init__()
        self.model = model
        self.rule = rule
        self.named = list(model.named_modules())
        self.buffer_names = frozenset(name for name, _ in model.named_buffers())
        self.recurrent = any(isinstance(module, nn.RNNBase) for _, module in self.named)
        self.packs = False

    def forward(self, batch: Batch) -> tuple[Tensor, Any]:
        """Return outputs and targets, with the model as it is."""
        return self.rule(self.model, batch)

    def pure(
        self, params: Params, batch: Batch, training: frozenset[str], within: AbstractContextManager | None = None
    ) -> tuple[tuple[Tensor, Any], Params]:
        """Return outputs and targets with these modules in training mode, and the parameters and buffers afterwards.

        A model that writes to a buffer writes to the one given. ``within`` is a context that sees the model's
        operations first.
        """
        swapped = {f"model.{name}": value for name, value in params.items()}
        batched = Batched()
        # Fused attention kernels have neither forward-mode nor second derivatives. Under autocast no derivatives are
        # taken, and the kernel that training used rounds as training did.
        with (
            sdpa_kernel(SDPBackend.MATH) if not _casting(swapped) else nullcontext(),
            plain_attention(),
            transformable(),
            whole_masks() if not _casting(swapped) else nullcontext(),
            batched if self.recurrent else nullcontext(),
            self.modes(training),
            self._without_backward_hooks(),
            within or nullcontext(),
        ):
            both = functional_call(self, swapped, (batch,))
        self.packs = self.packs or batched.packs
        return both, {name: swapped[f"model.{name}"] for name in params}

    @contextmanager
    def modes(self, training: frozenset[str]) -> Iterator[None]:
        """Put these modules into training mode and the others into evaluation mode, inside this context."""
        other = [module for name, module in self.named if module.training != (name in training)]
        for module in other:
            module.training = not module.training
        try:
            yield
        finally:
            for module in other:
                module.training = not module.training

    @contextmanager
    def _without_backward_hooks(self) -> Iterator[None]:
        """Take the modules' backward hooks away in this context: they log gradients, and ``torch.func`` cannot."""
        kinds = ("_backward_hooks", "_backward_pre_hooks")
        held = [(one, kind, getattr(one, kind)) for _, one in self.named for kind in kinds if getattr(one, kind)]
        for module, kind, _ in held:
            setattr(module, kind, {})
        try:
            yield
        finally:
            for module, kind, hooks in held:
                setattr(module, kind, hooks)

    def converted(self, model: nn.Module, dtype: torch.dtype) -> Called:
        """Return the same rule with a model of another dtype, to which batches are converted."""
        return Called(model, partial(_converted, self.rule, dtype))


def _casting(params: Params) -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in {tensor.device.type for tensor in params.values()})


def _converted(rule: Forward, dtype: torch.dtype, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    return rule(model, batches.converted(batch, dtype))


def default_targets(batch: Batch) -> Any:
    """Return the targets of a batch that ``default_forward`` understands."""
    if isinstance(batch, Mapping):
        return next(batch[key] for key in TARGET_KEYS if key in batch)
    return batch[-1]


def default_forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    """Call the model on ``(inputs..., targets)``, or on a dict of its keyword arguments and one target key."""
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        *inputs, targets = batch
        return model(*inputs), targets
    if isinstance(batch, Mapping):
        keys = [key for key in TARGET_KEYS if key in batch]
        if len(keys) == 1:
            return model(**{key: value for key, value in batch.items() if key != keys[0]}), batch[keys[0]]
    raise InputError(
        "A batch must be (inputs..., targets) or a dict with exactly one of the keys "
        f"{', '.join(TARGET_KEYS)}; for anything else give forward=lambda model, batch: (outputs, targets).",
        code="batch-not-understood",
    )
