"""TSLOO, trajectory-specific leave-one-out: scores compared with exact replays, query by query."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from leaveout.compute.resources import Resources
from leaveout.errors import InputError, check_seed, is_whole
from leaveout.estimators.question import Question
from leaveout.estimators.replay import replayed
from leaveout.evaluate.metrics.per_query import PerQuery, spearman_columns
from leaveout.run.reader import Run
from leaveout.scores import Scores
from leaveout.task.task import Task


def tsloo(
    scores: Scores,
    run: Run,
    task: Task,
    query: Dataset,
    *,
    replays: int = 200,
    seed: int = 0,
    resources: Resources | None = None,
) -> PerQuery:
    """Compute mean_q ρ_k(scores[k, q], L_q(θ^{−k}_N) − L_q(θ_N)): Spearman over left-out examples, mean over queries.

    θ^{−k}_N is the end of the same trajectory (start, batches, order) with example k's weight zero. Give scores with
    ``queries="each"``; those of the mean loss have one column, and count as one query.

    Args:
        scores: scores of single examples, or of groups that are left out together.
        run: the run that was scored.
        task: what was trained.
        query: the query set that was scored.
        replays: how many rows to replay, drawn at random.
        seed: for that draw.
        resources: memory budget and progress.
    """
    if len(scores.train_ids) < 2 or not is_whole(replays, 2):
        raise InputError("tsloo needs at least 2 scored rows and replays: it ranks them.", code="too-few-to-compare")
    order = torch.randperm(len(scores.train_ids), generator=torch.Generator().manual_seed(check_seed(seed)))
    rows = order[:replays].tolist()
    truth = replayed(scores, rows, Question(run, task, query, resources=resources or Resources()))
    estimate, exact = (values.double().cpu().numpy() for values in (scores.values[rows], truth.values))
    return PerQuery("TSLOO", spearman_columns(estimate, exact), len(rows), cost=truth.cost)
