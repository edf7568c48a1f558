"""Models inside wrappers: ``torch.compile``, ``DistributedDataParallel``, accelerate."""

from __future__ import annotations

from torch import nn

from leaveout.errors import InputError, kind_of


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside ``torch.compile`` and ``DistributedDataParallel``, whose names have no prefix."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"A model (an nn.Module) is needed, not {kind_of(model)}: give Recorder(path, model, optimizer), or "
            "Task(model, loss, train_set), in this order.",
            code="model-expected",
        )
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


ORIGINAL = "_original_forward"
"""The attribute where accelerate stores a model's ``forward`` when it replaces it by one in ``torch.autocast``."""


def casts_itself(model: nn.Module) -> bool:
    """Say whether accelerate has wrapped the model's ``forward`` in ``torch.autocast``."""
    return ORIGINAL in vars(model) and "forward" in vars(model)
