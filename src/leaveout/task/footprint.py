"""How much memory a forward pass keeps for its backward pass."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leaveout._util.trees import Params
from leaveout.task import batches
from leaveout.task.batches import Batch
from leaveout.task.objective import Objective


def activation_bytes(objective: Objective, params: Params, batch: Batch) -> int:
    """Estimate the bytes that one forward pass keeps for its backward pass, besides parameters and inputs."""
    for count in (_kept, _made):
        with suppress(Exception):  # an estimate never fails what it is an estimate for
            return count(objective, params, batch)
    return 0


def _kept(objective: Objective, params: Params, batch: Batch) -> int:
    """Count the bytes of what autograd saves; it says nothing inside transforms that a model itself applies."""
    held: dict[int, int] = {}
    shared = {leaf.data_ptr() for leaf in [*params.values(), *batches.leaves(batch)] if isinstance(leaf, Tensor)}
    alive = []

    def note(tensor: Tensor) -> None:  # returning the tensor would make a result part of its own history, never freed
        alive.append(tensor.detach())
        place = tensor.data_ptr() if tensor.layout is torch.strided else id(alive[-1])
        if place not in shared:
            held[place] = _nbytes(tensor)

    tracked = {n: t.detach().requires_grad_(n in objective.names) for n, t in params.items()}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda _: torch.empty(0)):
        objective.losses(tracked, batch)
    return sum(held.values())


def _made(objective: Objective, params: Params, batch: Batch) -> int:
    """Count the bytes of all results of operations, which is more than a backward pass needs."""
    with torch.no_grad(), _Results() as made:
        objective.losses(params, batch)
    return made.nbytes


class _Results(TorchDispatchMode):
    """Counts the bytes of the results of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self.nbytes += sum(_nbytes(leaf) for leaf in batches.leaves(results) if isinstance(leaf, Tensor))
        return results


def _nbytes(tensor: Tensor) -> int:
    """Count a tensor's bytes; of a sparse one, those of its values and of their places."""
    if tensor.layout is torch.strided:
        return tensor.numel() * tensor.element_size()
    return tensor._nnz() * (tensor.element_size() + 8 * tensor.ndim)
