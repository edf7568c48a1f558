"""What rows take with them when their examples leave a batch."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from leaveout._util.trees import Params, each, gather_sums, height, rows
from leaveout.diff.operator import StepOperator
from leaveout.task.training_batch import size_of

Pairs: TypeAlias = tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]
"""(row, position in the batch): the row leaves out the example at that position."""


class Leaving(NamedTuple):
    """What rows take with them.

    Attributes:
        rows: those with an example in this batch.
        shares: (1/|Z|) Σ g(z) over each one's examples.
        everyone: which of them take the whole batch.
        total: the sum of all examples' parts, for parameters in which their last digits matter.
    """

    rows: Int[Tensor, " affected"]
    shares: Params
    everyone: Bool[Tensor, " affected"]
    total: Params


def taken_out(operator: StepOperator, pairs: Pairs, shares: Params | None, sensitive: list[str]) -> Leaving:
    """Return (1/|Z|) Σ g(z) over each row's examples; ``shares`` are all examples' parts, if they are known.

    For the ``sensitive`` parameters all examples' parts are added up as well: without the only one that is not zero,
    such a sum is zero, and ḡ as it was computed may not be.
    """
    affected, local = _rows_of(pairs)
    position, size = _padded(pairs[1], size_of(operator.batch)), size_of(operator.batch)
    terms = operator.shares(position) if shares is None else _at_positions(shares, position)
    own = each(lambda tensor: tensor[: len(local)], terms)  # those beyond the pairs are padding
    own = own if len(affected) == len(local) else gather_sums(own, local, len(affected))
    return Leaving(affected, own, _everyone(local, len(affected), size), _total(operator, terms, position, sensitive))


def removed(operator: StepOperator, pairs: Pairs, gradient: Params) -> Leaving:
    """Return the change of the batch gradient ḡ when each row's examples are removed: they depend on each other."""
    affected, local = _rows_of(pairs)
    kept = next(iter(operator.params.values())).new_ones((len(affected), size_of(operator.batch)))
    kept[local, pairs[1]] = 0
    less = operator.gradients_with(kept)
    nobody = torch.zeros(len(affected), dtype=torch.bool)
    return Leaving(affected, {name: gradient[name] - tensor for name, tensor in less.items()}, nobody, {})


def _rows_of(pairs: Pairs) -> tuple[Int[Tensor, " affected"], Int[Tensor, " pairs"]]:
    """Return the rows with an example in the batch, and which of them each pair belongs to."""
    affected, local = torch.unique(pairs[0], return_inverse=True)
    if len(affected) == len(pairs[0]):  # one example per row: in the batch's own order
        return pairs[0], torch.arange(len(affected))
    return affected, local


def _everyone(local: Int[Tensor, " pairs"], count: int, size: int) -> Bool[Tensor, " affected"]:
    return torch.bincount(local, minlength=count) == size


def _total(operator: StepOperator, terms: Params, position: Int[Tensor, " chosen"], sensitive: list[str]) -> Params:
    """Compute the sum of all examples' parts; those at these positions are known."""
    if not sensitive:
        return {}
    place = torch.full((size_of(operator.batch),), -1).scatter_(0, position, torch.arange(len(position)))
    once = torch.zeros(len(position)).index_fill_(0, place[place >= 0], 1.0)
    total = {name: torch.tensordot(once.to(terms[name]), terms[name], 1) for name in sensitive}
    others = (place < 0).nonzero()[:, 0]
    for part in others.split(len(position)) if len(others) else ():  # as many at a time as the rows asked for
        more = operator.shares(part)
        total = {name: summed + more[name].sum(0) for name, summed in total.items()}
    return total


def _padded(position: Int[Tensor, " pairs"], size: int) -> Int[Tensor, " padded"]:
    """Repeat the last position up to one of a few lengths, so that there are few shapes to trace."""
    more = -len(position) % max(1, size // 8) if len(position) != size else 0
    return torch.cat([position, position[-1:].expand(more)])


def _at_positions(shares: Params, position: Int[Tensor, " chosen"]) -> Params:
    everyone = torch.arange(height(shares), device=position.device)
    return shares if torch.equal(position, everyone) else rows(shares, position)
