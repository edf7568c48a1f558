"""The cascade: cheap scores for all examples, exact replays for the few that matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.utils.data import Dataset

from leaveout.compute.resources import Resources
from leaveout.errors import InputError
from leaveout.estimators.question import Question
from leaveout.estimators.replay import replayed
from leaveout.run.reader import Run
from leaveout.scores import MEAN, UNIT, Scores
from leaveout.task.task import Task


def refine(
    scores: Scores,
    run: Run,
    task: Task,
    query: Dataset,
    *,
    top: int = 32,
    resources: Resources | None = None,
) -> Scores:
    """Replace the ``top`` most extreme scores (of examples or groups) by exact leave-one-out replays.

    Half of them are the most harmful, half the most helpful; ``scores.exact`` says which rows are exact. Rows that are
    exact already are not replayed again.
    """
    if not scores.is_effect:
        raise InputError(
            f"{scores.method} is counted in {scores.unit}, and a replay in {UNIT}: refine scores of another method.",
            code="unit-not-comparable",
        )
    if top < 1:
        raise InputError(f"top={top} leaves nothing to replay: give at least 1.", code="top-not-a-count")
    exact = torch.zeros(len(scores.values), dtype=torch.bool) if scores.exact is None else scores.exact.clone()
    rows = [row for row in scores.extreme(top) if not exact[row]]
    if not rows:
        return scores
    truth = replayed(scores, rows, Question(run, task, query, resources=resources or Resources()))
    values = scores.values.clone()
    values[rows] = truth.values.to(values)
    exact[rows] = True
    method = scores.method if scores.method.endswith("+ Replay") else f"{scores.method} + Replay"
    return replace(scores, values=values, method=method, exact=exact, cost=scores.cost + truth.cost)


def with_truths(scores: Scores, truths: Mapping[int | str, float]) -> Scores:
    """Return the mean scores with the true change of every row that was replayed, for a check or another method.

    Scores that are not changes of the loss cannot be replaced.
    """
    values = scores.mean().detach().double().cpu().clone()
    exact = torch.zeros(len(values), dtype=torch.bool) if scores.exact is None else scores.exact.cpu().clone()
    for row, name in enumerate(scores.train_ids if scores.is_effect else ()):
        if name in truths and not exact[row]:
            values[row], exact[row] = truths[name], True
    return replace(scores, values=values[:, None], query_ids=(MEAN,), exact=exact, spread=None)
