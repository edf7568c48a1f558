"""How well a score separates examples of a kind (wrong labels, say) from the others: area under the ROC, precision."""

from __future__ import annotations

import numpy as np
import scipy

from leaveout.errors import InputError
from leaveout.evaluate.metrics.agreement import Values, vector


def auc(suspicion: Values, wanted: Values) -> float:
    """Compute the area under the ROC curve: P(suspicion of a wanted example > suspicion of another one), ties half.

    Args:
        suspicion: a number per example, larger for those that should be found; for harmful examples ``-scores.mean()``.
        wanted: whether each example is one of those, true or false.

    >>> auc([0.9, 0.8, 0.3, 0.1], [True, False, True, False])
    0.75
    """
    x, chosen = _pair(suspicion, wanted)
    count = int(chosen.sum())
    ranks = scipy.stats.rankdata(x)[chosen].sum()
    return float((ranks - count * (count + 1) / 2) / (count * (len(x) - count)))


def average_precision(suspicion: Values, wanted: Values) -> float:
    """Compute Σ_t (R_t − R_{t−1}) P_t over the thresholds t: precision averaged over the wanted examples as found.

    Examples of equal suspicion are found together.

    Args:
        suspicion: a number per example, larger for those that should be found.
        wanted: whether each example is one of those, true or false.

    >>> average_precision([0.9, 0.8, 0.3, 0.1], [True, False, True, False])  # (1/1 + 2/3) / 2
    0.8333333333333333
    """
    x, chosen = _pair(suspicion, wanted)
    order = np.argsort(-x, kind="stable")
    hits = np.cumsum(chosen[order])
    last = np.flatnonzero(np.diff(x[order], append=-np.inf))  # the end of each run of equal values
    precision = hits[last] / (last + 1)
    return float((np.diff(hits[last], prepend=0) * precision).sum() / hits[-1])


def _pair(suspicion: Values, wanted: Values) -> tuple[np.ndarray, np.ndarray]:
    x, flags = vector("suspicion", suspicion), vector("wanted", wanted)
    if len(x) != len(flags):
        raise InputError(
            f"suspicion has {len(x)} examples and wanted {len(flags)}: give both for the same ids, in order.",
            code="lengths-differ",
        )
    if not np.isin(flags, (0.0, 1.0)).all() or not 0 < flags.sum() < len(flags):
        raise InputError(
            "wanted must be true for at least one example and false for at least one: give a truth value per example.",
            code="wanted-not-two-kinds",
        )
    return x, flags.astype(bool)
