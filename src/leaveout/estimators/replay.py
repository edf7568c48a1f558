"""Replay: the run again without the example. The ground truth that the estimators are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.data import Dataset

from leaveout._util.trees import Params, each
from leaveout.compute.resources import Resources
from leaveout.errors import InputError
from leaveout.estimators.base import Estimator, Request, titled
from leaveout.run.reader import Run
from leaveout.scores import Scores
from leaveout.sweep import budget
from leaveout.task.task import Task
from leaveout.trajectory.left_out import Groups, LeftOut, leave_out
from leaveout.trajectory.replay import counterfactuals


@dataclass(frozen=True)
class Replay(Estimator):
    """s' ← F_i(s'; w^{−k}): same start, same batches, same order, the example's weight zero, |Z_i| unchanged.

    Cost: one batch gradient per step and example; the models are trained side by side.

    Args:
        ids: the examples to leave out, one at a time; all of them by default.
        weight: the weight that a left-out example gets instead of one.
    """

    ids: Sequence[int] | Tensor | np.ndarray | None = None
    weight: float = 0.0

    @property
    def name(self) -> str:
        """The method's name."""
        return titled("Replay", {"weight": f"weight {self.weight:g}" if self.weight else None})

    def _left_out(self, task: Task, ids: Sequence[int] | None, groups: Groups | None) -> LeftOut:
        if self.ids is not None and (ids is not None or groups is not None):
            raise InputError(
                "Replay(ids=...) was given, and ids= or groups= as well: give one of them.", code="ids-given-twice"
            )
        return leave_out(task.size, cast("Sequence[int] | None", self.ids) if ids is None else ids, groups)

    def _exact(self, values: Float[Tensor, "rows queries"]) -> Bool[Tensor, " rows"] | None:
        return torch.ones(len(values), dtype=torch.bool) if self.weight == 0 else None

    def _values(self, request: Request) -> tuple[Tensor, Params | None]:
        # One more model in each stack is the undisturbed one, within the other half of the budget.
        bytes_each = budget.replay_bytes(request.trajectory)
        return request.rows(partial(_replayed, self.weight), bytes_each, "replaying")


def _replayed(weight: float, request: Request) -> tuple[Tensor, Params | None]:
    params = counterfactuals(request.trajectory, request.left_out, weight, request.resources, request.cost)
    losses = request.query.losses(params)
    # Compared with the undisturbed model of the same stack, so that rounding cancels.
    values = request.query.reduce(losses[:-1] - losses[-1:])
    return values, each(lambda tensor: tensor[:-1] - tensor[-1:], params) if request.displacements else None


def replayed(
    scores: Scores, rows: Sequence[int], run: Run, task: Task, query: Dataset, resources: Resources | None
) -> Scores:
    """Replay some rows of scores exactly, for the queries that were scored."""
    scores.check_same_run(run)
    names = [scores.train_ids[row] for row in rows]
    if scores.groups is None:
        truth = Replay(tuple(int(name) for name in names)).score(
            run, task, query, queries=scores.queries, resources=resources
        )
    else:
        groups = {str(name): scores.groups[str(name)] for name in names}
        truth = Replay().score(run, task, query, queries=scores.queries, groups=groups, resources=resources)
    scores.check_same_queries(truth)
    return truth
