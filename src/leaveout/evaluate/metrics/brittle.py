"""Brittleness: how many of the most helpful examples to leave out until a prediction flips, by replay and bisection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import Dataset

from leaveout._util.trees import Params, height
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, UnsupportedError, is_whole
from leaveout.estimators.query import query_fingerprint
from leaveout.run.reader import Run
from leaveout.scores import Scores
from leaveout.sweep import budget
from leaveout.task import batches
from leaveout.task.classes import Reading, class_logits, readings
from leaveout.task.task import Task
from leaveout.trajectory.left_out import leave_out
from leaveout.trajectory.replay import counterfactuals
from leaveout.trajectory.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class Brittleness:
    """For each query, the predicted class, how many examples had to be left out, and what was predicted then.

    ``table`` has a row per query: ``before``, ``removed`` (missing if ``most`` examples were not enough) and
    ``after``.
    """

    table: pd.DataFrame
    most: int
    cost: Cost = field(default_factory=Cost)

    @property
    def median(self) -> float:
        """The median number over all queries; infinite if less than half of them flip."""
        return float(self.table["removed"].astype(float).fillna(float("inf")).median())

    def __str__(self) -> str:
        flipped = int(self.table["removed"].notna().sum())
        words = f"{flipped} of {len(self.table)} predictions flip without at most {self.most} of their helpful examples"
        return f"{words} (median {self.median:g})" if flipped * 2 > len(self.table) else words


def brittleness(
    scores: Scores,
    run: Run,
    task: Task,
    query: Dataset,
    *,
    most: int | None = None,
    resources: Resources | None = None,
) -> Brittleness:
    """Find min{k : the run replayed without the k most helpful examples of a query predicts another class for it}.

    Found by bisection between 0 and ``most``, all queries side by side: about log2(most) + 1 replays per query. The
    prediction flips without the k examples returned, and does not without k − 1; a flip and flip back at smaller
    numbers is not noticed.

    Args:
        scores: of single examples with ``queries="each"``; only those with a score above zero are left out.
        run: the run that was scored.
        task: what was trained, a classifier.
        query: the query set that was scored.
        most: how many may be left out; half of the scored examples by default.
        resources: memory budget and progress.
    """
    scores.check_same_run(run)
    if scores.groups is not None or scores.queries != "each":
        raise InputError(
            "brittleness asks which examples helped each single prediction: give scores of single examples with "
            'queries="each".',
            code="queries-not-single",
        )
    scores.check_queries(tuple(range(batches.size(query))), query_fingerprint(task, query))
    most = max(1, len(scores.train_ids) // 2) if most is None else most
    if not is_whole(most, 1):
        raise InputError(f"most={most!r} must be a whole number of at least 1.", code="most-not-a-count")
    predict = _Predictions(Trajectory(run, task), query, (resources or Resources()).on(task.device))
    before = predict.recorded(len(scores.query_ids))
    queries = range(len(scores.query_ids))
    helpful = {query: ids for query in queries if (ids := _helpful(scores, query)[:most])}
    flips = _flips(predict, before, helpful)
    table = pd.DataFrame(
        {
            "before": before,
            "removed": pd.array([flips[q].removed if q in flips else None for q in queries], dtype="Int64"),
            "after": pd.array([flips[q].prediction if q in flips else None for q in queries], dtype="Int64"),
        },
        index=pd.Index(scores.query_ids, name="query"),
    )
    return Brittleness(table, most, predict.cost)


class _Flip(NamedTuple):
    """How many examples were left out when a prediction flipped, and what was predicted then."""

    removed: int
    prediction: int


def _flips(predict: _Predictions, before: list[int], helpful: dict[int, list[int]]) -> dict[int, _Flip]:
    """Find by bisection how few of its helpful examples flip each prediction; queries that do not flip have none."""
    after = predict.without(helpful) if helpful else []
    flips = {query: _Flip(len(helpful[query]), now) for query, now in after if now != before[query]}
    too_few = dict.fromkeys(flips, 0)
    while left_out := {
        query: helpful[query][: (too_few[query] + flip.removed) // 2]
        for query, flip in flips.items()
        if flip.removed - too_few[query] > 1
    }:
        for query, now in predict.without(left_out):
            if now != before[query]:
                flips[query] = _Flip(len(left_out[query]), now)
            else:
                too_few[query] = len(left_out[query])
    return flips


def _helpful(scores: Scores, column: int) -> list[int]:
    """Return the examples that helped a query, the most helpful first."""
    values = scores.values[:, column]
    order = torch.argsort(values, descending=True, stable=True)[: int((values > 0).sum())]
    return [int(scores.train_ids[row]) for row in order.tolist()]


class _Predictions:
    """Predicted classes of single queries by models that were trained without some examples."""

    def __init__(self, trajectory: Trajectory, query: Dataset, resources: Resources) -> None:
        self.trajectory, self.query, self.resources, self.cost = trajectory, query, resources, Cost()
        self._reading: Reading | None = None

    def recorded(self, count: int) -> list[int]:
        """Return the classes that the recorded run predicts for the first ``count`` queries."""
        params = self.trajectory.scored(self.trajectory.final_whole())
        return [self._of(params, q) for q in range(count)]

    def without(self, groups: dict[int, list[int]]) -> Iterable[tuple[int, int]]:
        """Return each query with the class that the run replayed without its group predicts for it."""
        with self.cost.metered(self.trajectory.task.device):
            left_out = leave_out(self.trajectory.task.size, groups=groups)
            size = self.resources.chunk(2 * budget.replay_bytes(self.trajectory), len(left_out))
            answers: list[tuple[int, int]] = []
            for part in left_out.chunks(size):
                params = counterfactuals(self.trajectory, part, 0.0, self.resources, self.cost)
                for row in range(height(params) - 1):
                    query = int(part.names[row])
                    answers.append((query, self._of({name: tensor[row] for name, tensor in params.items()}, query)))
        return answers

    def _of(self, params: Params, number: int) -> int:
        task = self.trajectory.task
        with torch.no_grad():
            outputs, targets = task.objective.outputs(params, task.read([number], self.query))
            reading = self._reading or self._read(outputs, targets)
        return int(class_logits(reading, outputs).argmax(1))

    def _read(self, outputs: Tensor, targets: Tensor) -> Reading:
        allowed = readings(outputs, targets, self.trajectory.task.objective.output_losses(outputs, targets))
        if not allowed:
            raise UnsupportedError(
                "brittleness counts flips of predicted classes, and these outputs are not scores of classes: give a "
                "task whose targets are class numbers.",
                code="labels-not-classes",
            )
        self._reading = next(reading for reading in Reading if reading in allowed)
        return self._reading
