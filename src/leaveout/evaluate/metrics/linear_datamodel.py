"""LDS, the linear datamodeling score: summed scores of subsets compared with models trained without them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from leaveout.compute.resources import Resources
from leaveout.errors import InputError, check_seed, is_whole
from leaveout.estimators.replay import Replay
from leaveout.evaluate.metrics.per_query import PerQuery, spearman_columns
from leaveout.run.reader import Run
from leaveout.scores import SELF, Scores
from leaveout.task.task import Task


def random_subsets(size: int, count: int = 100, share: float = 0.01, seed: int = 0) -> dict[str, list[int]]:
    """Draw ``count`` random subsets, each with a ``share`` of ``size`` examples (at least one).

    >>> [len(ids) for ids in random_subsets(200, count=3, share=0.05).values()]
    [10, 10, 10]
    """
    if not is_whole(count, 2) or not 0 < share < 1:
        raise InputError(
            f"subsets={count!r} of share={share!r} cannot be ranked: give 2 subsets or more, and a share between 0 "
            "and 1.",
            code="subsets-not-drawable",
        )
    order = torch.Generator().manual_seed(check_seed(seed))
    members = max(1, round(share * size))
    return {str(i): torch.randperm(size, generator=order)[:members].sort().values.tolist() for i in range(count)}


def lds(
    scores: Scores,
    run: Run,
    task: Task,
    query: Dataset,
    *,
    subsets: int = 100,
    share: float = 0.01,
    seed: int = 0,
    resources: Resources | None = None,
) -> PerQuery:
    """Compute mean_q ρ_S(Σ_{k∈S} scores[k, q], L_q(θ^{−S}_N) − L_q(θ_N)): the single-run LDS.

    θ^{−S}_N is the end of the same trajectory (start, batches, order) with the weights of all of S zero, by exact
    replay. This truth has no noise, so the ceiling is 1. Scores of groups are compared as they are, each with its own
    replay, and ``subsets``, ``share`` and ``seed`` are not used.

    Args:
        scores: scores of single examples, best with ``queries="each"``; subsets are drawn from those scored.
        run: the run that was scored.
        task: what was trained.
        query: the query set that was scored.
        subsets: how many.
        share: of the scored examples in each.
        seed: for the draw.
        resources: memory budget and progress.
    """
    scores.check_same_run(run)
    scores.check_same_measure(task.measure)
    if scores.queries == SELF:
        raise InputError(
            "Each of these scores is of an example's own loss, so they have no sum for a subset: give scores of "
            "queries.",
            code="queries-self",
        )
    if scores.groups is not None:
        groups, predicted = scores.groups, scores.values
    else:
        places = random_subsets(len(scores.train_ids), subsets, share, seed)
        groups = {name: [int(scores.train_ids[place]) for place in rows] for name, rows in places.items()}
        predicted = torch.stack([scores.values[rows].sum(0) for rows in places.values()])
    truth = Replay().score(run, task, query, queries=scores.queries, groups=groups, resources=resources)
    scores.check_same_queries(truth)
    per_query = spearman_columns(_array(predicted), _array(truth.values))
    return PerQuery("LDS", per_query, len(groups), cost=truth.cost)


def algorithm_lds(scores: Scores, kept: Sequence[Sequence[int]], losses: np.ndarray | Tensor) -> PerQuery:
    """Compute mean_q ρ_S(Σ_{k∉S} scores[k, q], mean over seeds of L_q(a model freshly trained on S)): algorithm LDS.

    Fresh trainings differ by their seed, so the truth is noisy. With m seeds whose losses agree at a mean Spearman r
    per pair, their mean has reliability m·r/(1 + (m − 1)·r) (Spearman-Brown), and a perfect prediction of the expected
    loss reaches about the square root of that: the ``ceiling``, without which the value cannot be interpreted.

    Args:
        scores: of every training example; ``queries="each"``, or the mean loss as one query.
        kept: for each subset the ids that its models were trained on.
        losses: shape (seeds, subsets, queries): the query losses of the models.
    """
    values, truth = _array(scores.values), _array(torch.as_tensor(losses))
    if truth.ndim != 3 or truth.shape[1:] != (len(kept), values.shape[1]) or len(kept) < 2 or not len(truth):
        raise InputError(
            f"losses has shape {list(truth.shape)}, but there are {len(kept)} subsets and {values.shape[1]} queries: "
            "give an array of seeds x subsets x queries, with 2 subsets or more.",
            code="losses-shape",
        )
    if not np.isfinite(truth).all():
        raise InputError(
            "losses has NaN or infinite values: leave those trainings out, or repeat them.", code="values-not-finite"
        )
    place = {example: row for row, example in enumerate(scores.train_ids)}
    left_out = np.ones((len(kept), len(place)))
    for subset, ids in enumerate(kept):
        if strange := [i for i in ids if i not in place]:
            raise InputError(
                f"Subset {subset} has example {strange[0]!r}, which was not scored: score all training examples.",
                code="subset-not-scored",
            )
        left_out[subset, [place[i] for i in ids]] = 0
    per_query = spearman_columns(left_out @ values, truth.mean(0))
    return PerQuery("algorithm LDS", per_query, len(kept), noise_ceiling(truth))


def noise_ceiling(repeats: np.ndarray) -> float:
    """Compute √(m·r/(1 + (m − 1)·r)): the most that a perfect prediction can reach given m noisy repeats.

    ``repeats`` has shape (repeats, rows, queries). r is the Spearman correlation between two repeats, averaged over
    pairs and queries; the result is NaN for a single repeat, and 0 if r < 0.
    """
    count = len(repeats)
    if count < 2:
        return math.nan
    pairs = [spearman_columns(repeats[i], repeats[j]) for i, j in combinations(range(count), 2)]
    r = max(0.0, float(np.nanmean(pairs)))
    return math.sqrt(count * r / (1 + (count - 1) * r))


def _array(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()
