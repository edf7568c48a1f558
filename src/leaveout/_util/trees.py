"""Dictionaries of tensors as vectors: parameters by name, stacked along a first dimension when there are many."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import vjp

Params: TypeAlias = dict[str, Tensor]
"""One tensor per parameter; a *stack* of m such vectors has tensors of shape (m, *shape)."""

State: TypeAlias = dict[str, Params]
"""Slot (``"param"`` or an optimizer buffer) to parameters."""

PARAM = "param"

LARGE = 1 << 20
"""From this many numbers on, a tensor is not copied to be joined with others."""


def inner(left: Params, right: Params) -> Float[Tensor, "left right"]:
    """Compute all inner products between two stacks: ``out[i, j] = Σ_p left[p][i] · right[p][j]``.

    >>> inner({"w": torch.eye(2)}, {"w": torch.tensor([[3.0, 4.0]])}).tolist()
    [[3.0], [4.0]]
    """
    return sum_of(flat_rows(left[name]) @ flat_rows(right[name]).T for name in left)


def inner_rows(left: Params, right: Params) -> Float[Tensor, " rows"]:
    """Compute the inner products of two stacks row by row: ``out[i] = Σ_p left[p][i] · right[p][i]``."""
    return sum_of(flat_rows(left[name] * right[name]).sum(1) for name in left)


def flat_rows(stack: Tensor) -> Tensor:
    """Flatten each tensor of a stack to a row; single numbers have one column."""
    return stack.reshape(len(stack), 1) if stack.ndim == 1 else stack.flatten(1)


def sum_of(terms: Iterator[Tensor]) -> Tensor:
    """Sum one or more tensors, without a starting zero of another dtype or device."""
    total = next(terms)
    for term in terms:
        total = total + term
    return total


def memory(tensor: Tensor) -> int:
    """Return the address at which a tensor's memory begins, the same for all views of it."""
    own = 0 if tensor.storage_offset() else tensor.data_ptr()  # creating a storage object takes longer
    return own or tensor.untyped_storage().data_ptr()


def memories(tensors: Sequence[Tensor]) -> set[int]:
    """Return the addresses at which the memory of several tensors begins, with as few calls as possible."""
    if any(map(Tensor.storage_offset, tensors)):
        return set(map(memory, tensors))
    return set(map(Tensor.data_ptr, tensors))


def height(stack: Params) -> int:
    """Return how many vectors a stack holds."""
    return len(next(iter(stack.values())))


def split(stack: Params, size: int) -> Iterator[Params]:
    """Split the stack into chunks of at most ``size`` vectors."""
    for start in range(0, height(stack), size):
        yield {name: tensor[start : start + size] for name, tensor in stack.items()}


def each(function: Callable[..., Tensor], *trees: Params) -> Params:
    """Apply the same tensor function to every parameter."""
    return {name: function(*(tree[name] for tree in trees)) for name in trees[0]}


def rows(stack: Params, index: Int[Tensor, " chosen"] | slice) -> Params:
    """Return the chosen vectors of a stack."""
    return {name: tensor[index] for name, tensor in stack.items()}


def state_rows(stack: State, index: Int[Tensor, " chosen"] | slice) -> State:
    """Return the chosen states of a stack."""
    return {slot: rows(params, index) for slot, params in stack.items()}


def replace_rows(stack: State, index: Int[Tensor, " chosen"], new: State) -> State:
    """Return the stack with the chosen states replaced."""
    return {
        slot: {name: tensor.index_copy(0, index.to(tensor.device), new[slot][name]) for name, tensor in params.items()}
        for slot, params in stack.items()
    }


def add_rows(total: Tensor, index: Int[Tensor, " terms"], terms: Tensor, alpha: float = 1.0) -> Tensor:
    """Add ``alpha`` times each term to its row of the total, in place; the index may be on another device.

    >>> add_rows(torch.zeros(2), torch.tensor([1, 1]), torch.tensor([3.0, 4.0])).tolist()
    [0.0, 7.0]
    """
    return total.index_add_(0, index.to(total.device), terms, alpha=alpha)


def gather_sums(terms: Params, index: Int[Tensor, " terms"], count: int) -> Params:
    """Return a stack of ``count`` vectors whose row r is the sum of the terms with ``index == r``."""
    return {
        name: add_rows(tensor.new_zeros((count, *tensor.shape[1:])), index, tensor) for name, tensor in terms.items()
    }


def expand(state: State, count: int) -> State:
    """Repeat the same state ``count`` times, without copying."""
    return {
        slot: {name: tensor.expand(count, *tensor.shape) for name, tensor in params.items()}
        for slot, params in state.items()
    }


def zeros(state: State, count: int) -> State:
    """Return a stack of ``count`` zero vectors shaped like the state."""
    return {
        slot: {name: tensor.new_zeros((count, *tensor.shape)) for name, tensor in params.items()}
        for slot, params in state.items()
    }


def embed(params: Params, like: State, slot: str = PARAM) -> State:
    """Embed a stack of parameter vectors as state vectors: zero in every slot but one."""
    others = zeros({name: tensors for name, tensors in like.items() if name != slot}, height(params))
    own = params if slot == PARAM else {name: params[name] for name in like[slot]}
    return {name: own if name == slot else others[name] for name in like}


def pullback(function: Callable, *at: Any) -> tuple[Any, Callable]:
    """Apply ``torch.func.vjp``: return the value, and the function that pulls cotangents back."""
    out = vjp(function, *at)
    return out[0], out[1]


def nbytes(state: State) -> int:
    """Count the bytes that one state takes."""
    return sum(tensor.numel() * tensor.element_size() for params in state.values() for tensor in params.values())


def norm(params: Params) -> float:
    """Compute the Euclidean norm of one vector, in float64.

    >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
    5.0
    """
    return math.hypot(*(float(piece.double().norm()) for (piece,) in _pieces(params)))


def distance(left: Params, right: Params) -> float:
    """Compute the Euclidean norm of the difference of two vectors, in float64.

    >>> distance({"a": torch.tensor([3.0])}, {"a": torch.tensor([1.0])})
    2.0
    """
    return math.hypot(*(float((one - other).detach().double().norm()) for one, other in _pieces(left, right)))


def _pieces(*trees: Params) -> Iterator[tuple[Float[Tensor, " width"], ...]]:
    """Yield the same piece of each vector: small tensors joined, which is quick, and each large one as it is."""
    small = [name for name, tensor in trees[0].items() if tensor.numel() < LARGE]
    if small:
        yield tuple(torch.cat([tree[name].flatten() for name in small]) for tree in trees)
    for name, tensor in trees[0].items():
        if tensor.numel() >= LARGE:
            yield tuple(tree[name].flatten() for tree in trees)
