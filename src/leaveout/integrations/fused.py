"""Models whose ``forward`` was replaced by one that returns losses without logits, as TRL's trainers do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from leaveout._util.wrappers import ORIGINAL, casts_itself

FUSED = "fused_lm_head"
"""The keyword argument that TRL's trainers pass to such a model."""


def unfused(model: nn.Module) -> nn.Module:
    """Return a model that shares everything with this one but has the ``forward`` of its class, which returns logits.

    With adapters, the model is inside them.
    """
    if not hasattr(model, "peft_config"):
        return _as_defined(model)
    adapters: Any = model.base_model
    if adapters is model.get_base_model():  # type: ignore[operator] # learned prompts
        return _with(model, "base_model", _as_defined(adapters))
    return _with(model, "base_model", _with(adapters, "model", _as_defined(adapters.model)))


class FusedCall:
    """A call of such a model by its class's ``forward``, with its last layer rounded as in TRL's kernel.

    Under ``torch.autocast`` that kernel multiplies 16-bit numbers, and accumulates gradients in 32 bits; without
    autocast there is no difference.
    """

    def __init__(self, call: Callable) -> None:
        self._call = call

    def __call__(self, model: Any, batch: Any) -> Any:
        """Call the model."""
        inner = model.get_base_model() if hasattr(model, "peft_config") else model
        hook = inner.get_output_embeddings().register_forward_hook(_projected)
        try:
            return self._call(model, batch)
        finally:
            hook.remove()


def _projected(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    kind = output.device.type
    if not torch.is_autocast_enabled(kind):
        return output
    narrow = torch.get_autocast_dtype(kind)

    def rounded(tensor: Tensor) -> Tensor:
        wide = tensor.float()
        return wide + (wide.to(narrow).float() - wide).detach()

    with torch.autocast(kind, enabled=False):
        logits = F.linear(rounded(inputs[0]), rounded(layer.weight))
        # The values are those of the 16-bit kernel, which sums in its own order.
        values = F.linear(inputs[0].detach().to(narrow), layer.weight.detach().to(narrow)).float()
        logits = (logits + (values - logits).detach()).to(narrow)
        return logits if layer.bias is None else logits + layer.bias.to(narrow)


def _with(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    changed = copy.copy(module)
    changed._modules = {**module._modules, name: child}
    return changed


def _as_defined(model: nn.Module) -> nn.Module:
    plain, cast = copy.copy(model), casts_itself(model)
    vars(plain).pop("forward", None)
    if cast:  # keep the attributes that say so
        plain.forward = MethodType(type(model).forward, plain)
        vars(plain)[ORIGINAL] = plain.forward
    return plain
