"""How much of a score is rounding error: a sample of rows recomputed in float64 along the same recorded run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.utils.data import Dataset

from leaveout._util.trees import State
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError
from leaveout.estimators import Estimator, Replay
from leaveout.evaluate.selection import others
from leaveout.run.model_match import constants_of
from leaveout.run.reader import Run
from leaveout.run.record import Record
from leaveout.scores import Scores
from leaveout.task.task import Task


@dataclass(frozen=True)
class Rounding:
    """The difference between scores and the same scores in float64.

    ``typical`` is the median and ``largest`` the maximum over ``count`` rows and their queries, ``scale`` the largest
    score by magnitude, ``worst`` the row of the largest difference.
    """

    typical: float
    largest: float
    scale: float
    worst: int | str
    count: int
    method: str
    cost: Cost

    @property
    def share(self) -> float:
        """The largest difference as a fraction of the largest score."""
        if self.scale > 0:
            return self.largest / self.scale
        return float("inf") if self.largest > 0 else 0.0

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.share < 1e-4:
            verdict = "rounding does not matter"
        elif self.share < 1e-2:
            verdict = "rounding changes the order of very close scores only"
        else:
            verdict = "rounding is part of these scores: train and score in float64 to tell close ones apart"
        return (
            f"{self.method} against float64 on {self.count} examples: typical difference {self.typical:.1e}, largest "
            f"{self.largest:.1e} (example {self.worst}), which is {self.share:.1g} of the largest score; {verdict}."
        )

    def __str__(self) -> str:
        return self.sentence


def rounding(
    scores: Scores,
    estimator: Estimator,
    run: Run,
    task: Task,
    query: Dataset,
    *,
    sample: int = 32,
    seed: int = 0,
    resources: Resources | None = None,
) -> Rounding:
    """Recompute the most extreme scores and a random sample of the rest in float64.

    The states are the recorded ones; every gradient, product and sum is taken in float64. ``Replay`` starts from the
    recorded first state and trains in float64.

    Args:
        scores: scores of single examples.
        estimator: the estimator that computed them.
        run: the run that was scored.
        task: what was trained.
        query: the query set that was scored.
        sample: how many rows, half of them the most extreme.
        seed: for the random half.
        resources: memory budget and progress.
    """
    if any(isinstance(i, str) for i in scores.train_ids):
        raise InputError("These are scores of groups: give scores of single examples.", code="rounding-needs-examples")
    if sample < 1:
        raise InputError(f"sample={sample} leaves nothing to compare: give at least 1.", code="sample-empty")
    scores.check_same_run(run)
    extreme = scores.extreme((sample + 1) // 2)
    rows = extreme + others(extreme, range(len(scores.train_ids)), sample - len(extreme), seed)
    ids = [int(scores.train_ids[row]) for row in rows]
    double = task.of(task.objective.to_dtype(torch.float64))
    if isinstance(estimator, Replay):
        by_groups: Estimator = replace(estimator, ids=None)  # the groups say which examples are left out
    else:
        by_groups = estimator
    exact = by_groups.score(
        Doubled(run, constants_of(double.model, run.rule)),
        double,
        query,
        queries=scores.queries,
        groups=[[i] for i in ids],
        resources=resources,
    )
    scores.check_same_queries(exact)
    if estimator.resolved(run, task).name != scores.method:
        raise InputError(
            f"These scores are by {scores.method}, not by {estimator.resolved(run, task).name}: give what gave them.",
            code="scores-by-another-method",
        )
    difference = (scores.values[rows].double().cpu() - exact.values.cpu()).abs()
    worst = int(difference.max(1).values.argmax())
    return Rounding(
        float(difference.median()),
        float(difference.max()),
        float(scores.values.abs().max()),
        ids[worst],
        len(rows),
        scores.method,
        exact.cost,
    )


class Doubled(Run):
    """A run with its states in float64; recomputed steps do not agree with them to that precision."""

    as_recorded = False

    def __init__(self, run: Run, constants: dict[str, int]) -> None:
        dtypes = dict.fromkeys(run.manifest.dtypes, "float64")
        super().__init__(
            run.path,
            replace(run.manifest, dtypes=dtypes, constants=constants),
            interpolate=run.interpolate,
            steps=len(run),
        )
        self._single = run
        self.__dict__["on_disk"] = run.on_disk

    def __reduce__(self) -> tuple:
        """Pickle it as what it was built from."""
        return Doubled, (self._single, self.manifest.constants)

    def record(self, index: int) -> Record:
        """Return step ``index`` without its state."""
        return self._single.record(index)

    def state(self, index: int) -> State:
        """Return a kept state in float64."""
        state = self._single.state(index)
        return {slot: {name: tensor.double() for name, tensor in params.items()} for slot, params in state.items()}
