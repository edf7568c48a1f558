"""A batch as training saw it: with the random draws of its forward pass and the denominator of its loss.

A step is taken on one batch or on a window of several micro-batches:

    L(θ; w) = Σ_j (1/D_j) Σ_{k ∈ Z_j} w_k ℓ_k = (1/|Z|) Σ_k w_k (|Z|/D_{j(k)}) ℓ_k,     |Z| = Σ_j |Z_j|

so that every loss times its *scale* |Z|/D_j is the loss of an ordinary batch of |Z| examples.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leaveout.errors import UnsupportedError
from leaveout.task.batches import Batch, leaves, map_leaves
from leaveout.task.draws import Draws


class TrainingBatch(NamedTuple):
    """One micro-batch: plain batches are evaluated in evaluation mode, these as they were trained on.

    Attributes:
        batch: what the loader yielded.
        draws: random draws with examples as first dimension, as ``example_draws.by_example`` returns them.
        whole: random draws that cannot be split by example; then single examples cannot be computed alone.
        scale: |Z|/D of each example, or empty if that is 1.
    """

    batch: Batch
    draws: Draws = {}  # noqa: RUF012 - never written to
    whole: Draws = {}  # noqa: RUF012
    scale: Any = ()


class Window(NamedTuple):
    """The micro-batches whose gradients were added up for one step."""

    parts: tuple[TrainingBatch, ...]


class Picked(NamedTuple):
    """Examples of a window whose micro-batches differ in shape: groups of one shape, and how to put them in order."""

    groups: tuple[TrainingBatch, ...]
    order: Tensor


def parts_of(batch: Batch) -> tuple[Batch, ...]:
    """Return the micro-batches of a window, or the batch itself."""
    return batch.parts if isinstance(batch, Window) else (batch,)


def size_of(batch: Batch) -> int:
    """Count the examples of a batch.

    >>> size_of(Window((TrainingBatch([torch.zeros(2, 3)]), TrainingBatch([torch.zeros(1, 3)]))))
    3
    """
    return sum(len(leaves(part)[0]) for part in parts_of(batch))


def has_shared_draws(batch: Batch) -> bool:
    """Say whether there are random draws that cannot be split by example."""
    return any(isinstance(part, TrainingBatch) and bool(part.whole) for part in parts_of(batch))


def take(batch: Batch, index: Tensor) -> Batch:
    """Return the chosen examples of a batch or window."""
    if has_shared_draws(batch):
        raise UnsupportedError(
            "This method looks at single examples of a batch, and the random draws of the forward pass cannot be "
            "told apart by example: use SGDIE(), TracIn(), ACC(transport='exact') or Replay().",
            code="examples-not-separable",
        )
    if not isinstance(batch, Window):
        return map_leaves(lambda leaf: leaf[index], batch)
    parts = [_with_scale(part) for part in batch.parts]
    shapes = {tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves(part)) for part in parts}
    if len(shapes) == 1:
        joined = iter([torch.cat(pieces) for pieces in zip(*map(leaves, parts), strict=True)])
        whole = map_leaves(lambda _: next(joined), parts[0])
        return map_leaves(lambda leaf: leaf[index], whole)
    groups, places, start = [], [], 0
    for part in parts:
        stop = start + size_of(part)
        inside = ((index >= start) & (index < stop)).nonzero()[:, 0]
        if len(inside):
            at = index[inside] - start
            groups.append(map_leaves(partial(_rows, at), part))
            places.append(inside)
        start = stop
    return Picked(tuple(groups), torch.argsort(torch.cat(places)))


def joined(batch: Batch) -> Batch:
    """Return a window as one batch with a scale per example; refuse one whose micro-batches differ in shape."""
    if not isinstance(batch, Window):
        return batch
    whole = take(batch, torch.arange(size_of(batch)))
    if isinstance(whole, Picked):
        raise UnsupportedError(
            "This method takes a step's micro-batches together, and theirs differ in shape: pad all examples to one "
            "length, or use SGDIE(), TracIn(), ACC() or Replay().",
            code="micro-batches-differ",
        )
    return whole


def _rows(index: Tensor, leaf: Tensor) -> Tensor:
    return leaf[index]


def _with_scale(part: TrainingBatch) -> TrainingBatch:
    """Return the part with an explicit scale, so that all parts of a window have the same structure."""
    if isinstance(part.scale, Tensor):
        return part
    first = leaves(part)[0]
    return part._replace(scale=torch.ones(len(first), device=first.device))
