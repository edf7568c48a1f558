"""How well estimated scores agree with exact ones: RMSE, Kendall's τ, Spearman's ρ, Jaccard overlap, with intervals.

Every metric takes two one-dimensional sequences over the same examples in the same order and returns a float. Input
that cannot be compared (different lengths, fewer than two examples, NaN or infinity) raises `InputError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import TypeAlias

import numpy as np
import pandas as pd
import scipy
import torch

from leaveout.errors import InputError, check_seed

Values: TypeAlias = np.ndarray | torch.Tensor | pd.Series | Sequence
Percents: TypeAlias = Sequence[int | float]
Metric: TypeAlias = Callable[..., float]
Rows: TypeAlias = Callable[..., np.ndarray]

_DENSE = 2048  # up to this n, τ of all resamples is a few products with n x n matrices, exact in float32 (n² < 2²⁴)
_CHUNK = 2**22  # numbers in one block of resamples


def rmse(estimate: Values, truth: Values) -> float:
    """Compute sqrt(mean_i (estimate_i - truth_i)²), in the unit of the scores.

    >>> rmse([0.0, 0.0], [3.0, 3.0])
    3.0
    """
    return _whole(_rmse_rows, estimate, truth)


def kendall(estimate: Values, truth: Values) -> float:
    """Compute τ_b = (concordant - discordant) / sqrt(pairs untied in estimate · pairs untied in truth).

    NaN if one side is constant: it has no untied pair, so no order to agree with.

    >>> round(kendall([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]), 4)  # (2 - 1) / 3
    0.3333
    """
    x, y = _pair(estimate, truth)
    return float(scipy.stats.kendalltau(x, y).statistic)


def spearman(estimate: Values, truth: Values) -> float:
    """Compute ρ = corr(rank(estimate), rank(truth)), ties sharing their mean rank; NaN if one side is constant.

    >>> spearman([1.0, 2.0, 3.0], [1.0, 3.0, 2.0])  # 1 - 6 (0 + 1 + 1) / (3 (9 - 1))
    0.5
    """
    return _whole(_spearman_rows, estimate, truth)


def jaccard(estimate: Values, truth: Values, percent: int | float) -> float:
    """Compute |A ∩ B| / |A ∪ B|, A and B the `percent` % most influential by either list, half from each tail.

    From each tail of the signed scores come k = max(1, round(n · percent / 200)) examples (a half is rounded to the
    even number, as in Python); both tails form one set, so an example found at the wrong end still counts. Of equal
    scores the earlier one counts as lower, in both lists.

    >>> jaccard([-3.0, 0.0, 1.0, 2.0], [-3.0, 0.0, 2.0, 1.0], percent=50)  # {0, 3} and {0, 2}
    0.3333333333333333
    """
    return _whole(partial(_jaccard_rows, percent=percent), estimate, truth)


def jaccard_magnitude(estimate: Values, truth: Values, percent: int | float) -> float:
    """Compute |A ∩ B| / |A ∪ B|, A and B the `percent` % of examples with the largest |score| by either list.

    A set has max(1, round(n · percent / 100)) examples; of equal magnitudes the later one counts as the larger.

    >>> jaccard_magnitude([-3.0, 0.0, 1.0, 2.0], [-3.0, 0.0, 2.0, -4.0], percent=50)  # {0, 3} twice
    1.0
    """
    return _whole(partial(_magnitude_rows, percent=percent), estimate, truth)


@dataclass(frozen=True)
class Interval:
    """A value and its confidence interval [low, high] at `level`.

    >>> print(Interval(0.93, 0.85, 0.97))
    0.93 (0.85 to 0.97)
    """

    value: float
    low: float
    high: float
    level: float = 0.95

    def __str__(self) -> str:
        style = ".2f" if max(abs(self.value), abs(self.low), abs(self.high)) >= 0.1 else ".2g"
        return f"{self.value:{style}} ({self.low:{style}} to {self.high:{style}})"

    def lowered(self, by: float) -> Interval:
        """Return the interval of a correlation lowered by this much, but not below -1.

        >>> print(Interval(0.5, -0.95, 0.75).lowered(0.1))
        0.40 (-1.00 to 0.65)
        """
        value, low, high = (max(end - by, -1.0) for end in (self.value, self.low, self.high))
        return Interval(value, low, high, self.level)


def bootstrap(
    metric: Metric, estimate: Values, truth: Values, *, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Compute [q_{(1-level)/2}, q_{(1+level)/2}] of metric(estimate[s], truth[s]), s drawn with replacement.

    `metric` is any function of two arrays. This module's own, and `functools.partial(jaccard, percent=...)`, are
    computed for all resamples at once, with the same result as a loop over the resamples. The same seed draws the same
    resamples for every metric.

    An example drawn twice is tied with itself in both lists. τ_b leaves such pairs out of numerator and denominator, so
    they neither raise nor lower it; Spearman gives the copies their mean rank; Jaccard counts each copy as an element.
    Resamples in which the metric is NaN (all draws equal) are left out; if all are, the bounds are NaN.
    A percentile interval need not be centred on the value, and for a biased metric need not contain it.

    >>> bootstrap(rmse, [0.0, 0.0, 0.0], [2.0, 2.0, 2.0])
    Interval(value=2.0, low=2.0, high=2.0, level=0.95)
    """
    x, y = _pair(estimate, truth)
    if resamples < 1:
        raise InputError(
            f"resamples is {resamples}, which draws nothing: give 1 or more (1000 is usual).",
            code="resamples-not-a-count",
        )
    if not 0 < level < 1:
        raise InputError(
            f"level is {level}, not a confidence strictly between 0 and 1: give for example 0.95.",
            code="level-out-of-range",
        )
    check_seed(seed, 0)
    rows = _rows(metric)
    draws = np.concatenate([rows(x, y, index) for index in _resamples(len(x), resamples, seed)])
    draws = draws[~np.isnan(draws)]
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2]) if len(draws) else (np.nan, np.nan)
    return Interval(float(metric(x, y)), float(low), float(high), level)


@dataclass(frozen=True)
class Agreement:
    """All metrics of one comparison over `count` examples; `jaccard` maps a percentage to its interval."""

    rmse: Interval
    kendall: Interval
    spearman: Interval
    jaccard: dict[int | float, Interval]
    count: int

    def of_a_sample(self) -> Agreement:
        """Return the same agreement, with an honest interval of τ where no pair of the sample is discordant.

        No resample has a discordant pair then, however few examples there are: the bootstrap's interval has no width.
        With 1 − τ the expected share of discordant pairs, times 2, n examples have none with a probability of about
        exp(−(1 − τ)·n(n − 1)/4), so the interval begins at 1 + 4·ln((1 − level)/2)/(n(n − 1)).

        >>> print(compare(range(8), range(8)).kendall, "|", compare(range(8), range(8)).of_a_sample().kendall)
        1.00 (1.00 to 1.00) | 1.00 (0.74 to 1.00)
        """
        tau, pairs = self.kendall, self.count * (self.count - 1)
        if not tau.value >= 1 - 1e-12:
            return self
        least = max(-1.0, 1 + 4 * math.log((1 - tau.level) / 2) / pairs)
        return replace(self, kendall=replace(tau, low=min(tau.low, least)))

    def lowered(self, by: float) -> Agreement:
        """Return the same agreement with both rank correlations lowered by this much."""
        return replace(self, kendall=self.kendall.lowered(by), spearman=self.spearman.lowered(by))

    def to_frame(self) -> pd.DataFrame:
        """Tabulate the metrics (rmse, kendall, spearman, jaccard@70, ...): value, low, high, level, count."""
        intervals = {"rmse": self.rmse, "kendall": self.kendall, "spearman": self.spearman}
        intervals |= {f"jaccard@{percent:g}": interval for percent, interval in self.jaccard.items()}
        rows = [(i.value, i.low, i.high, i.level, self.count) for i in intervals.values()]
        return pd.DataFrame(rows, pd.Index(intervals, name="metric"), ["value", "low", "high", "level", "count"])


def compare(
    estimate: Values, truth: Values, *, percents: Percents = (70, 50, 30, 10), resamples: int = 1000, seed: int = 0
) -> Agreement:
    """Compute every metric with its 95% bootstrap interval, all on the same resamples.

    >>> compare([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], percents=[50]).to_frame()["value"].to_dict()
    {'rmse': 0.0, 'kendall': 1.0, 'spearman': 1.0, 'jaccard@50': 1.0}
    """
    x, y = _pair(estimate, truth)
    interval = partial(bootstrap, estimate=x, truth=y, resamples=resamples, seed=seed)
    overlaps = {percent: interval(partial(jaccard, percent=percent)) for percent in percents}
    return Agreement(interval(rmse), interval(kendall), interval(spearman), overlaps, len(x))


def repeatability(repeats: Sequence[Values], *, resamples: int = 1000, level: float = 0.95, seed: int = 0) -> Interval:
    """Compute the mean τ_b over all pairs of repeats of one measurement, with its bootstrap interval over the examples.

    >>> round(repeatability([[1.0, 2.0, 3.0], [1.0, 3.0, 2.0], [1.0, 2.0, 3.0]]).value, 6)  # (1/3 + 1 + 1/3) / 3
    0.555556
    """
    pairs = [_pair(one, other) for one, other in combinations(repeats, 2)]
    if not pairs:
        raise InputError("A single repeat agrees with nothing: give two or more.", code="too-few-to-compare")
    blocks = list(_resamples(len(pairs[0][0]), resamples, check_seed(seed, 0)))
    draws = np.mean([np.concatenate([_kendall_rows(*pair, index) for index in blocks]) for pair in pairs], axis=0)
    draws = draws[~np.isnan(draws)]
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2]) if len(draws) else (np.nan, np.nan)
    return Interval(float(np.mean([kendall(*pair) for pair in pairs])), float(low), float(high), level)


# Below: each metric for many resamples at once. Row b of `index` (resamples x n) names the examples of resample b.


def _rmse_rows(x: np.ndarray, y: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.sqrt(((x - y) ** 2)[index].mean(axis=1))


def _kendall_rows(x: np.ndarray, y: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Compute cᵀ(X∘Y)c / sqrt(cᵀX²c · cᵀY²c), X and Y the signs of differences, c how often each example was drawn."""
    size, n = len(index), len(x)
    if n > _DENSE:
        return _loop_rows(kendall, x, y, index)
    flat = (index + n * np.arange(size)[:, None]).ravel()
    counts = np.bincount(flat, minlength=size * n).reshape(size, n).astype(np.float32)
    X, Y = ((v[:, None] > v).astype(np.float32) - (v[:, None] < v) for v in (x, y))
    agree, untied_x, untied_y = (((counts @ M) * counts).sum(axis=1, dtype=np.float64) for M in (X * Y, X * X, Y * Y))
    with np.errstate(invalid="ignore"):
        return agree / np.sqrt(untied_x * untied_y)


def _spearman_rows(x: np.ndarray, y: np.ndarray, index: np.ndarray) -> np.ndarray:
    centre = (len(x) + 1) / 2
    a, b = (scipy.stats.rankdata(v[index], axis=1) - centre for v in (x, y))
    with np.errstate(invalid="ignore"):
        return (a * b).sum(axis=1) / np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))


def _jaccard_rows(x: np.ndarray, y: np.ndarray, index: np.ndarray, percent: int | float, tails: int = 2) -> np.ndarray:
    if not 0 < percent <= 100:
        raise InputError(
            f"percent is {percent}, not a share of the examples: give a number above 0 and up to 100.",
            code="percent-out-of-range",
        )
    k = max(1, round(len(x) * percent / (100 * tails)))
    A, B = np.zeros((2, *index.shape), dtype=bool)
    for members, values in ((A, x), (B, y)):
        codes = scipy.stats.rankdata(values, method="dense").astype(
            np.min_scalar_type(len(x))
        )  # small integers sort fast
        order = np.argsort(codes[index], axis=1, kind="stable")
        np.put_along_axis(members, order[:, -k:], True, axis=1)
        np.put_along_axis(members, order[:, : k * (tails - 1)], True, axis=1)
    return (A & B).sum(axis=1) / (A | B).sum(axis=1)


def _magnitude_rows(x: np.ndarray, y: np.ndarray, index: np.ndarray, percent: int | float) -> np.ndarray:
    return _jaccard_rows(np.abs(x), np.abs(y), index, percent, tails=1)


def _loop_rows(metric: Metric, x: np.ndarray, y: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.array([metric(x[row], y[row]) for row in index], dtype=float)


_ROWS: dict[Metric, Rows] = {rmse: _rmse_rows, kendall: _kendall_rows, spearman: _spearman_rows}
_ROWS |= {jaccard: _jaccard_rows, jaccard_magnitude: _magnitude_rows}


def _rows(metric: Metric) -> Rows:
    """Return the version of a metric for all resamples at once; a loop for a function from elsewhere."""
    function, options = (
        (metric.func, metric.keywords) if isinstance(metric, partial) and not metric.args else (metric, {})
    )
    return partial(_ROWS[function], **options) if function in _ROWS else partial(_loop_rows, metric)


def _whole(rows: Rows, estimate: Values, truth: Values) -> float:
    x, y = _pair(estimate, truth)
    return float(rows(x, y, np.arange(len(x))[None])[0])


def _resamples(n: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    rng, size = np.random.default_rng(seed), max(1, _CHUNK // n)
    for start in range(0, resamples, size):
        yield rng.integers(n, size=(min(size, resamples - start), n))


def _pair(estimate: Values, truth: Values) -> tuple[np.ndarray, np.ndarray]:
    x, y = vector("estimate", estimate), vector("truth", truth)
    if len(x) != len(y):
        raise InputError(
            f"estimate has {len(x)} examples and truth {len(y)}: give both for the same ids, in order.",
            code="lengths-differ",
        )
    if len(x) < 2:
        raise InputError(
            f"{len(x)} example(s) cannot be compared: give at least 2, and some 50 for useful intervals.",
            code="too-few-to-compare",
        )
    return x, y


def vector(name: str, values: Values) -> np.ndarray:
    """Return one finite number per example as an array, or refuse the values."""
    try:
        values = values.detach().cpu().double().numpy() if isinstance(values, torch.Tensor) else values
        array = np.asarray(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name} is not a sequence of numbers ({error}): give one score per example.",
            code="not-one-score-per-example",
        ) from error
    if array.ndim != 1:
        raise InputError(
            f"{name} has shape {array.shape}, not one score per example: give one column at a time.",
            code="not-one-score-per-example",
        )
    if bad := int(np.count_nonzero(~np.isfinite(array))):
        raise InputError(
            f"{name} has {bad} NaN or infinite score(s): find out why they diverged, or leave them out.",
            code="values-not-finite",
        )
    return array
