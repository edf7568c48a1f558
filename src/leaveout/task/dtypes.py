"""Converts a task to another floating-point type: float64 to check derivatives, float32 to evaluate a 16-bit model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from leaveout.task.losses import taken_apart

if TYPE_CHECKING:
    from leaveout.task.task import Task


def converted(task: Task, dtype: torch.dtype) -> Task:
    """Give a task, which is changed, a copy of its model of this dtype; batches are converted when they are used."""
    called = task.called
    task.model = _module(task.model, dtype)
    task._first = next(task.model.parameters(), None)
    task.loss = _module(task.loss, dtype) if isinstance(task.loss, nn.Module) else task.loss
    task.parts = taken_apart(task.loss)
    task.called = called.converted(task.model, dtype)
    return task


def _module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(module)._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
