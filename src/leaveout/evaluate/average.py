"""Scores of several runs combined: what an example does on average over seeds, and how much that varies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leaveout.compute.cost import Cost
from leaveout.errors import InputError
from leaveout.scores import Scores

FEWEST = 8
"""Rows below which a run's spread says nothing about its scale: fewer are averaged as they are."""


def average(scores: Sequence[Scores]) -> Scores:
    """Average the scores of runs that differ in their seeds: (1/m) Σ_r c_r·s_r, with the standard deviation over r.

    The mean estimates the example's effect on the *algorithm* rather than on one run; its standard error is
    ``spread/√m``. Estimates of a run whose vectors grew are many times as large as those of the others, which they
    would drown in a plain mean. So each run's estimates are first scaled to the same standard deviation over the rows,
    query by query: c_r = median_r(σ_r)/σ_r. The median keeps the unit: these are changes of the loss, as large as in
    the run in the middle. Signs and ranks within a run do not change. Exact replays are not scaled, as they are not
    estimates: they are averaged as they are. So are fewer than 8 rows. An entry is exact if it is exact in every run:
    exact for each run, that is, not for the expectation.

    Args:
        scores: of the same rows and queries by the same method, one per run; two or more.

    >>> one, two = (Scores(torch.tensor([[x]]), (0,), ("mean",), "SGD-IE") for x in (1.0, 3.0))
    >>> both = average([one, two])
    >>> both.values, both.spread, both.method
    (tensor([[2.]]), tensor([[1.4142]]), 'SGD-IE, mean of 2 runs')
    """
    scores = list(scores)
    if len(scores) < 2:
        raise InputError(
            f"{len(scores)} run cannot be averaged: give scores of two or more.", code="too-few-to-compare"
        )
    first = scores[0]
    for other in scores[1:]:
        first.check_same_queries(other)
        for what in ("train_ids", "groups", "unit", "method"):
            if getattr(first, what) != getattr(other, what):
                raise InputError(
                    f"Scores of different {what.replace('_', ' ')} cannot be averaged: score every run with the same "
                    "method, rows and queries.",
                    code="scores-not-alike",
                )
    stack = torch.stack([_estimates_scaled(one, by) for one, by in zip(scores, _scales(scores), strict=True)])
    masks = [one.exact for one in scores if one.exact is not None]
    exact = torch.stack(masks).all(0) if len(masks) == len(scores) else None
    cost = sum((one.cost for one in scores), Cost())
    return Scores(
        stack.mean(0),
        first.train_ids,
        first.query_ids,
        f"{first.method}, mean of {len(scores)} runs",
        cost,
        exact=exact,
        query_fingerprint=first.query_fingerprint,
        sign=first.sign,
        unit=first.unit,
        groups=first.groups,
        precision=first.precision,
        held=first.held,
        spread=stack.std(0),
    )


def _scales(scores: Sequence[Scores]) -> Float[Tensor, "runs queries"]:
    """Return what each run's estimates are multiplied by, for each query: the median run's spread over its own."""
    rows = [one.values[_estimated(one)] for one in scores]
    if min(map(len, rows)) < FEWEST:
        return torch.ones(len(rows), rows[0].shape[1], dtype=rows[0].dtype)
    spreads = torch.stack([values.std(0) for values in rows])
    known = torch.where(spreads > 0, spreads, torch.nan)  # a constant column has no scale, and keeps its values
    return torch.nan_to_num(known.nanmedian(0).values / known, nan=1.0)


def _estimates_scaled(scores: Scores, by: Float[Tensor, " queries"]) -> Float[Tensor, "rows queries"]:
    return torch.where(_estimated(scores)[:, None], scores.values * by.to(scores.values), scores.values)


def _estimated(scores: Scores) -> Bool[Tensor, " rows"]:
    """Mark the rows that are estimates."""
    return torch.ones(len(scores.values), dtype=torch.bool) if scores.exact is None else ~scores.exact
