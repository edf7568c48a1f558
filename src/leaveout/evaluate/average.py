"""Scores of several runs combined: what an example does on average over seeds, and how much that varies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from leaveout.compute.cost import Cost
from leaveout.errors import InputError
from leaveout.scores import Scores


def average(scores: Sequence[Scores]) -> Scores:
    """Average the scores of runs that differ in their seeds: (1/m) Σ_r s_r, with the standard deviation over r.

    The mean estimates the example's effect on the *algorithm* rather than on one run; its standard error is
    ``spread/√m``. An entry is exact if it is exact in every run: exact for each run, that is, not for the expectation.

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
    stack = torch.stack([one.values for one in scores])
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
        spread=stack.std(0),
    )
