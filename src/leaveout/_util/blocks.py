"""Coordinates of many parameters, a few at a time: as many as stay in the CPU cache while they are used."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leaveout._util.trees import Params, flat_rows


class Block(NamedTuple):
    """Some coordinates of one parameter, in memory order, for all vectors of a stack."""

    name: str
    columns: slice = slice(None)

    def of(self, params: Params) -> Float[Tensor, " columns"]:
        """Return these coordinates of one vector."""
        return params[self.name].flatten()[self.columns]

    def of_rows(self, stack: Params) -> Float[Tensor, "rows columns"]:
        """Return these coordinates of every vector of a stack."""
        return flat_rows(stack[self.name])[:, self.columns]


class Joined(NamedTuple):
    """All coordinates of several small parameters, one after the other, for all vectors of a stack."""

    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first of the parameters, which has the same hyperparameters as the others."""
        return self.names[0]

    def of(self, params: Params) -> Float[Tensor, " columns"]:
        """Return these coordinates of one vector."""
        return torch.cat([params[name].flatten() for name in self.names])

    def of_rows(self, stack: Params) -> Float[Tensor, "rows columns"]:
        """Return these coordinates of every vector of a stack."""
        return torch.cat([flat_rows(stack[name]) for name in self.names], dim=1)


class Touched(NamedTuple):
    """Some rows of a matrix, different for each vector of a stack: those of an embedding that an example's words touch.

    For each, ``rows`` has its vector in the stack and ``places`` its row in the matrix.
    """

    name: str
    rows: Int[Tensor, " touched"]
    places: Int[Tensor, " touched"]

    def of(self, params: Params) -> Float[Tensor, "touched columns"]:
        """Return these rows of one vector."""
        return params[self.name].flatten(1)[self.places]

    def of_rows(self, stack: Params) -> Float[Tensor, "touched columns"]:
        """Return each row from its own vector of a stack."""
        return stack[self.name].flatten(2)[self.rows, self.places]


SMALL = 8
"""Parameters that would fit into a block this many times are joined with others."""

SPARSE = 1 / 4
"""The share of nonzero rows of a matrix up to which they are handled one by one."""


def touched(stack: Params, name: str) -> Touched | None:
    """Return the nonzero rows of a matrix, if they are few.

    >>> touched({"w": torch.eye(8)[None, :, :2]}, "w").places.tolist()
    [0, 1]
    """
    tensor = stack[name]
    if tensor.ndim < 3 or not len(tensor) or not _few(tensor[0].flatten(1)):
        return None
    used = _used(tensor.flatten(2))
    return Touched(name, *used.nonzero().unbind(1)) if int(used.sum()) <= SPARSE * used.numel() else None


def _few(matrix: Tensor) -> bool:
    return int(_used(matrix).sum()) <= SPARSE * len(matrix)


def _used(matrices: Tensor) -> Tensor:
    return (matrices.amax(-1) != 0) | (matrices.amin(-1) != 0)  # ten times as fast as a norm


Coordinates: TypeAlias = Block | Joined | Touched


def blocks(stack: Params, size: int, alike: Mapping[str, Hashable]) -> Iterator[Coordinates]:
    """Cut a stack into blocks of at most ``size`` numbers over all vectors, but at least one column each.

    For matrices with few nonzero rows, only these are returned. Parameters much smaller than a block are joined if
    ``alike`` has the same value for them.

    >>> stack = {"w": torch.zeros(2, 3), "a": torch.zeros(2), "b": torch.zeros(2)}
    >>> [block.columns for block in blocks({"w": stack["w"]}, 4, {})]
    [slice(0, 2, None), slice(2, 3, None)]
    >>> [*blocks(stack, 16, {"a": 0, "b": 0})][-1]
    Joined(names=('a', 'b'))
    """
    small: dict[Hashable, list[str]] = {}
    for name, tensor in stack.items():
        if (few := touched(stack, name)) is not None:
            yield few
        elif tensor.numel() <= size // SMALL:
            key = (alike[name], tensor.dtype)
            if sum(stack[other].numel() for other in small.get(key, ())) + tensor.numel() > size:
                yield Joined(tuple(small.pop(key)))
            small.setdefault(key, []).append(name)
        else:
            width = tensor.shape[1:].numel()
            step = max(1, size // max(1, len(tensor)))
            for start in range(0, width, step):
                yield Block(name, slice(start, min(start + step, width)))
    yield from (Joined(tuple(names)) for names in small.values())
