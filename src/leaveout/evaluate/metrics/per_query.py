"""A rank correlation per query, and its mean over the queries."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import scipy

from leaveout._util.equality import Comparable
from leaveout.compute.cost import Cost


@dataclass(frozen=True, eq=False)
class PerQuery(Comparable):
    """Spearman's ρ between predicted and true changes of each query's loss, and the mean of it.

    ``per_query`` is NaN for a query whose predicted or true changes are all equal; the mean leaves those out.
    ``count`` is how many rows (left-out examples or subsets) were compared, ``ceiling`` the most that a perfect
    prediction of the expected loss could reach if the truth is noisy (None: the truth is exact, the ceiling is 1;
    NaN: it was not measured), ``cost`` the cost of the replays.

    >>> print(PerQuery("LDS", np.array([0.5, 0.7, np.nan]), 100))
    LDS 0.60 (mean Spearman over 2 queries, 100 rows each)
    """

    protocol: str
    per_query: np.ndarray
    count: int
    ceiling: float | None = None
    cost: Cost = field(default_factory=Cost)

    @property
    def value(self) -> float:
        """The mean over the queries."""
        there = self.per_query[~np.isnan(self.per_query)]
        return float(there.mean()) if len(there) else math.nan

    def __str__(self) -> str:
        count = int((~np.isnan(self.per_query)).sum())
        words = f"{self.protocol} {self.value:.2f} (mean Spearman over {count} queries, {self.count} rows each)"
        if self.ceiling is None:
            return words
        if math.isnan(self.ceiling):
            return f"{words}; one training per subset does not show its noise: train each with two seeds or more"
        return f"{words}; the noise of the retrainings allows about {self.ceiling:.2f} at most"


def spearman_columns(estimate: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Compute ρ of each column of two matrices, tied values sharing their mean rank; NaN if one side is constant.

    >>> spearman_columns(np.array([[1.0], [2.0], [3.0]]), np.array([[1.0], [3.0], [2.0]]))
    array([0.5])
    """
    centre = (len(estimate) + 1) / 2
    a, b = (scipy.stats.rankdata(values, axis=0) - centre for values in (estimate, truth))
    with np.errstate(invalid="ignore"):
        return (a * b).sum(0) / np.sqrt((a * a).sum(0) * (b * b).sum(0))
