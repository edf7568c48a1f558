"""Models whose ``forward`` was replaced by one that returns losses without logits, as TRL's trainers do."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

from torch import nn

from leaveout.task.forward import ORIGINAL, casts_itself

FUSED = "fused_lm_head"
"""What TRL's trainers tell such a model."""


def unfused(model: nn.Module) -> nn.Module:
    """Return a model that shares everything with this one but has the ``forward`` of its class, which returns logits.

    Adapters hold the model as ``base_model.model``.
    """
    if not hasattr(model, "peft_config"):
        return _as_defined(model)
    adapters: Any = model.base_model
    return _with(model, "base_model", _with(adapters, "model", _as_defined(adapters.model)))


def _with(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    changed = copy.copy(module)
    changed._modules = {**module._modules, name: child}
    return changed


def _as_defined(model: nn.Module) -> nn.Module:
    plain, cast = copy.copy(model), casts_itself(model)
    vars(plain).pop("forward", None)
    if cast:  # what says so stays
        plain.forward = MethodType(type(model).forward, plain)
        vars(plain)[ORIGINAL] = plain.forward
    return plain
