"""Which rows are replayed, and how optimistic a method's tau is if it was chosen on the same replays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout.errors import check_seed

RESAMPLES = 200


def sample(
    scores: Float[Tensor, "methods rows"], done: Sequence[int], order: Sequence[int], count: int
) -> dict[int, str]:
    """Choose rows to replay, in turns the most extreme by the mean rank over all methods and the next in random order.

    Extremes distinguish methods with far fewer replays than random rows, whose true effects are small. Those that are
    ``done`` were drawn at random; as many extremes come next.
    """
    ranks = scores.argsort(dim=1).argsort(dim=1).double().mean(0)
    ascending = torch.argsort(ranks, stable=True).tolist()
    ends = dict.fromkeys(row for pair in zip(reversed(ascending), ascending, strict=True) for row in pair)
    known = set(done)
    extreme = [row for row in ends if row not in known][: count // 2]
    known |= set(extreme)
    random = [row for row in order if row not in known][: max(0, count - len(known))]
    ahead = len(done)
    return {
        **dict.fromkeys(done, "random"),
        **dict.fromkeys(extreme[:ahead], "extreme"),
        **dict(in_turns(extreme[ahead:], random)),
    }


def others(extreme: Sequence[int], rows: Sequence[int], count: int, seed: int) -> list[int]:
    """Draw at random ``count`` of the rows that are not among the extreme ones.

    >>> sorted(others([0, 4], range(5), 3, seed=0))
    [1, 2, 3]
    """
    rest = sorted(set(rows) - set(extreme))
    drawn = torch.randperm(len(rest), generator=torch.Generator().manual_seed(check_seed(seed)))[:count]
    return [rest[place] for place in drawn.tolist()]


def in_turns(extreme: Sequence[int], random: Sequence[int]) -> list[tuple[int, str]]:
    """Return all rows with the sample they are in, such that any beginning has as many of each, up to one.

    >>> in_turns([3, 4, 5], [0])
    [(3, 'extreme'), (0, 'random'), (4, 'extreme'), (5, 'extreme')]
    """
    both = zip_longest(((row, "extreme") for row in extreme), ((row, "random") for row in random))
    return [one for pair in both for one in pair if one is not None]


def optimism(
    estimates: Float[Tensor, "methods rows"], truth: Float[Tensor, " rows"], resamples: int = RESAMPLES, seed: int = 0
) -> float:
    """Estimate by how much the tau of the best method is too high on the rows that it was chosen on, 0 or more.

    This is the mean over bootstrap resamples of tau(m*; resample) − tau(m*; rows that were not drawn), with m* the best
    method on the resample. A resample has fewer distinct rows than there are, so this errs on the side of caution.
    """
    if len(estimates) < 2:
        return 0.0  # there was nothing to choose from
    order = torch.Generator().manual_seed(seed)
    rows = len(truth)
    drawn = torch.stack(
        [torch.randint(rows, (rows,), generator=order).bincount(minlength=rows) for _ in range(resamples)]
    ).to(torch.float32)
    agree = _signs(estimates) * _signs(truth[None])
    inside, outside = (_taus(agree, weights) for weights in (drawn, (drawn == 0).to(drawn)))
    best = inside.argmax(0, keepdim=True)
    return max(0.0, float((inside.gather(0, best) - outside.gather(0, best)).mean()))


def _signs(values: Float[Tensor, "methods rows"]) -> Float[Tensor, "methods rows rows"]:
    return (values[:, :, None] - values[:, None]).sign().to(torch.float32)


def _taus(
    agree: Float[Tensor, "methods rows rows"], weights: Float[Tensor, "resamples rows"]
) -> Float[Tensor, "methods resamples"]:
    """Compute Σ_{i≠j} w_i w_j a_ij / Σ_{i≠j} w_i w_j: Kendall's tau of rows with these multiplicities."""
    total = torch.einsum("sr,mrq,sq->ms", weights, agree, weights)
    return total / (weights.sum(1) ** 2 - weights.square().sum(1))
