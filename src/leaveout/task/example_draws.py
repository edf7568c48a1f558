"""Which part of a batch's random draws belongs to which example: draws split by example, for ``vmap``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from leaveout.errors import MismatchError, UnsupportedError
from leaveout.task.batches import Batch, leaves, map_leaves
from leaveout.task.draws import Draws, note, replay

TRIES = 8
"""From how many states of the generator a single example is tried until it takes the same path as the batch."""


class Axis(NamedTuple):
    """The dimension of a draw that indexes the batch's examples.

    Attributes:
        dim: the dimension.
        inner: whether examples are its inner part if it is merged with another dimension, as in (time · examples);
            otherwise they are its outer part, as in attention's (examples · heads).
    """

    dim: int
    inner: bool = False


Axes: TypeAlias = dict[str, Axis | None]
"""For every draw its example axis; None for a draw that all examples share, such as a mask of weights."""


def by_example(draws: Draws, axes: Axes, count: int) -> Draws:
    """Move the batch's ``count`` examples to the first dimension of each draw: entry i belongs to example i.

    ``vmap`` over the first dimension gives each example its part; a loop takes ``{name: value[i] ...}``.
    """
    if list(draws) != list(axes):
        raise MismatchError(
            "The forward pass took another path than the one whose draws were looked at: "
            f"{', '.join(draws)} instead of {', '.join(axes)}.",
            code="draws-of-other-path",
        )
    return {name: _cut(value, axes[name], count) for name, value in draws.items()}


def together(cut: Draws, axes: Axes) -> Draws:
    """Join draws that were split by example: the inverse of ``by_example``."""
    return {name: _joined(value, axes[name]) for name, value in cut.items()}


def _joined(value: Tensor, axis: Axis | None) -> Tensor:
    if axis is None:
        return value[0]
    return value.movedim(0, axis.dim + axis.inner).flatten(axis.dim, axis.dim + 1)


def example_axes(rows: Callable[[Batch], Tensor], batch: Batch, draws: Draws) -> Axes:
    """Find the example axes of the draws of ``rows(batch)``.

    They are found by comparison with the draws of a batch of one, and then confirmed: single examples, with their part
    of the draws, must give the same result as in the batch.

    Args:
        rows: a forward pass that returns one row per example, such as its losses.
        batch: the examples; with a single one there is nothing to compare, and all draws count as shared.
        draws: the draws that ``note`` returned for ``rows(batch)``.

    Raises:
        UnsupportedError: if the draws cannot be split by example; use the batch as a whole then.
    """
    count = len(leaves(batch)[0])
    if count == 1:
        return dict.fromkeys(draws)
    with torch.no_grad():
        alone = _alone(rows, batch, draws)
        outer = {name: _axis(name, value, alone[name], count) for name, value in draws.items()}
        inner = {name: axis and axis._replace(inner=True) for name, axis in outer.items()}
        with replay(draws):
            together = rows(batch)
        for axes in (outer, inner):
            if _confirmed(rows, batch, by_example(draws, axes, count), together):
                return axes
    raise UnsupportedError(
        "An example alone, with its part of the batch's random draws, does not give what it gives in the batch: draws "
        "are in an order that is not known, or examples are mixed.",
        code="example-draws-differ",
    )


def _alone(rows: Callable[[Batch], Tensor], batch: Batch, draws: Draws) -> Draws:
    """Return the draws of a batch of one on the same path; a model that decides by a draw may have several paths."""
    alone: Draws = {}
    for seed in range(TRIES):
        alone = note(lambda: rows(_only(batch, 0)), {"cpu": torch.Generator().manual_seed(seed).get_state()})
        if list(alone) == list(draws):
            return alone
    raise UnsupportedError(
        f"{len(leaves(batch)[0])} examples together take {len(draws)} random draws, and one alone takes {len(alone)}, "
        "or others: they cannot be told apart by example.",
        code="draws-not-by-example",
    )


def _cut(value: Tensor, axis: Axis | None, count: int) -> Tensor:
    if axis is None:
        return value.expand(count, *value.shape)
    rest = value.shape[axis.dim] // count
    if axis.inner:
        return value.unflatten(axis.dim, (rest, count)).movedim(axis.dim + 1, 0)
    return value.unflatten(axis.dim, (count, rest)).movedim(axis.dim, 0)


def _axis(name: str, value: Tensor, alone: Tensor, count: int) -> Axis | None:
    """Find the dimension in which a draw for ``count`` examples is larger than a draw for one; None if it is shared."""
    pairs = list(zip(value.shape, alone.shape, strict=False))
    larger = [dim for dim, (many, one) in enumerate(pairs) if many != one]
    by_example = all(pairs[dim][0] == count * pairs[dim][1] for dim in larger)
    one_axis = value.ndim == alone.ndim and len(larger) <= 1 and by_example
    if not one_axis or (larger and name.split()[1] == "randperm"):
        raise UnsupportedError(
            f"Random draw {name} has shape {list(value.shape)} for {count} examples and {list(alone.shape)} for one: "
            "it cannot be told apart by example.",
            code="draw-shape-not-by-example",
        )
    return Axis(larger[0]) if larger else None


def _confirmed(rows: Callable[[Batch], Tensor], batch: Batch, cut: Draws, together: Tensor) -> bool:
    """Say whether some examples give the same result alone as in the batch."""
    count = len(together)
    for i in {1, count // 2, count - 1}:
        with replay({name: value[i] for name, value in cut.items()}):
            row = rows(_only(batch, i))
        if not torch.allclose(row, together[i : i + 1], rtol=1e-3, atol=1e-5, equal_nan=True):
            return False
    return True


def _only(batch: Batch, i: int) -> Batch:
    return map_leaves(lambda leaf: leaf[i : i + 1], batch)
