"""One function applied to many examples or models: by ``vmap``, or by a loop if an operation has no batching rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import vmap

from leaveout.task import batches
from leaveout.task.rewrites.missing_rules import WrittenOut, quiet_loops


def side_by_side(function: Callable, in_dims: Any = 0) -> Callable:
    """Apply ``vmap``, with operations written out for which it has no batching rule."""

    def call(*args: Any) -> Any:
        with WrittenOut(), quiet_loops():
            return vmap(function, in_dims)(*args)

    return call


def looped(function: Callable, in_dims: Any = 0) -> Callable:
    """Do what ``vmap`` does by a Python loop: slower, same values, for operations without a batching rule."""

    def call(*args: Any) -> Any:
        dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
        count = next(len(batches.leaves(a)[0]) for a, dim in zip(args, dims, strict=True) if dim == 0)
        results = [
            function(*(batches.pick(arg, i) if dim == 0 else arg for arg, dim in zip(args, dims, strict=True)))
            for i in range(count)
        ]
        return _stack(results)

    return call


def _stack(nests: list[Any]) -> Any:
    first = nests[0]
    if isinstance(first, dict):
        return {key: _stack([nest[key] for nest in nests]) for key in first}
    if isinstance(first, tuple | list):
        return type(first)(_stack([nest[i] for nest in nests]) for i in range(len(first)))
    return torch.stack(nests)
