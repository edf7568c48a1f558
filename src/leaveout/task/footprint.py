"""How much memory a forward pass keeps for its backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leaveout._util.trees import Params
from leaveout.task import batches
from leaveout.task.batches import Batch

if TYPE_CHECKING:
    from leaveout.task.task import Task


def activation_bytes(task: Task, params: Params, batch: Batch) -> int:
    """Count the bytes that one forward pass keeps for its backward pass, besides parameters and inputs."""
    held: dict[int, Tensor] = {}
    shared = {leaf.data_ptr() for leaf in [*params.values(), *batches.leaves(batch)] if isinstance(leaf, Tensor)}

    def note(tensor: Tensor) -> None:  # returning the tensor would make a result part of its own history, never freed
        if tensor.data_ptr() not in shared:
            held[tensor.data_ptr()] = tensor.detach()

    tracked = {n: t.detach().requires_grad_(n in task.names) for n, t in params.items()}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda _: torch.empty(0)):
        task.losses(tracked, batch)
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())
