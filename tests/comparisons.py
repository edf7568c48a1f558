"""Comparing derivatives once for all tasks of a test process that have the same structure.

Most tests make tasks whose derivatives were compared a moment ago, for the same layers, loss and shapes. A comparison
that finds a problem is never remembered, and tests of the comparison itself are marked ``compared_anew``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import leaveout.task.checks
import leaveout.task.guard.comparison
from leaveout.task.guard.compare import compared

REMEMBERED: dict[Any, Any] = {}
PLAIN = (bool, int, float, str, tuple, type(None))


def _kind(tensor: Any) -> Any:
    return (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else type(tensor)


def _structure(module: Any) -> Any:
    """What a module or function is, without its numbers; functions are the same only if they are one object."""
    if not isinstance(module, nn.Module):
        return module
    tensors = [*module.named_parameters(), *module.named_buffers()]
    kinds = tuple((name, _kind(tensor), tensor.requires_grad) for name, tensor in tensors)
    return repr(module), kinds, tuple((type(part), _settings(part)) for part in module.modules())


def _settings(module: nn.Module) -> tuple:
    """A module's own attributes, as far as they are plain values or functions, and how many hooks it has."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, PLAIN) or callable(value)}
    return tuple(plain.items()), len(module._forward_hooks), len(module._forward_pre_hooks)


def _question(objective: Any, params: Any, batch: Any, before: Any) -> Any:
    settings = (
        objective.l2,
        objective.chosen,
        objective.coupled,
        objective.statistics,
        objective.accumulation,
        objective.mode,
    )
    leaves, shape = tree_flatten((params, batch))
    kinds = tuple(map(_kind, leaves))
    values = _structure(objective.model), _structure(objective.loss), objective.called.rule, objective.clip
    return (*settings, *values, kinds, str(shape), before, torch.get_default_dtype())


def remembered(objective: Any, params: Any, batch: Any, before: Any = None) -> Any:
    """As ``compared``."""
    key = _question(objective, params, batch, before)
    try:
        known = REMEMBERED.get(key)
    except TypeError:  # something in it has no hash
        return compared(objective, params, batch, before)
    if known is None:
        known = compared(objective, params, batch, before)
        if known[0] is None:
            REMEMBERED[key] = known
    return known


def share(sharing: bool) -> None:
    """From here on, tasks remember each other's comparisons, or do not."""
    for place in (leaveout.task.checks, leaveout.task.guard.comparison):
        place.compared = remembered if sharing else compared  # type: ignore[attr-defined]
