"""When in training an example's influence arose: SGD-IE's score, split by epoch.

SGD-IE's score is a sum over the example's occurrences, ``score_k = Σ_{i : k∈Z_i} c_i ⟨u_{i+1}, g(z_k, θ_i)⟩``. One
backward sweep visits them all, so one column per epoch costs no more than the score itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset

from leaveout._util.trees import add_rows
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError
from leaveout.estimators.query import Query
from leaveout.estimators.readout import Linear
from leaveout.run.model_match import warn_of_other_weights
from leaveout.run.reader import Run
from leaveout.scores import Scores
from leaveout.sweep import budget
from leaveout.sweep.sweep import Sweep
from leaveout.task.task import Task
from leaveout.trajectory.left_out import Groups, leave_out
from leaveout.trajectory.trajectory import Trajectory

MOST = 40


@dataclass(frozen=True)
class Timeline:
    """What each part of training contributed to the change of the mean query loss without an example.

    ``values`` has one row per entry of ``train_ids`` and one column per entry of ``spans``; a row sums to SGD-IE's
    score. ``fingerprint`` is that of the queries, as stored in scores.
    """

    values: Float[Tensor, "train spans"]
    train_ids: tuple[int | str, ...]
    spans: tuple[str, ...]
    fingerprint: int

    def check_same_queries(self, scores: Scores) -> None:
        """Refuse to be shown with scores of other queries."""
        if scores.query_fingerprint not in (None, self.fingerprint):
            raise InputError(
                f"{scores.method} was scored for other queries than these: give the query set that was scored.",
                code="queries-differ",
            )


def timeline(
    run: Run,
    task: Task,
    query: Dataset,
    *,
    ids: Sequence[int] | None = None,
    groups: Groups | None = None,
    resources: Resources | None = None,
) -> Timeline:
    """Compute SGD-IE's score for the mean query loss, one column per epoch.

    More than 40 epochs are merged into at most 40 spans; if only one epoch was recorded, its steps are split into
    spans.

    Args:
        run: the recorded run.
        task: what was trained.
        query: the examples whose mean loss is explained.
        ids: only these examples.
        groups: these groups instead of single examples.
        resources: memory budget and progress.
    """
    trajectory, resources = Trajectory(run, task).compared(query), (resources or Resources()).on(task.device)
    final = trajectory.scored(trajectory.final())
    warn_of_other_weights(run, task.parameters(), final)
    asked = Query(trajectory.task, final, query, single=False, resources=resources.inside())
    asked.check(gradient=True)
    budget.check(resources, trajectory, budget.backward_bytes(trajectory), "one query vector")
    left_out = leave_out(task.size, ids, groups)
    names, column = spans([run.record(i).epoch for i in range(len(run))])
    vectors = Linear().vectors(asked)
    values = next(iter(vectors.values())).new_zeros((len(left_out), len(names)))
    for recorded, pulled in Sweep(trajectory).pulled(vectors, resources, Cost()):
        row, position = left_out.pairs(recorded.record.ids)
        add_rows(values[:, column[recorded.record.index]], row, pulled.reads[0, position], alpha=-1)
    return Timeline(values.cpu(), left_out.names, names, asked.fingerprint())


def spans(epochs: Sequence[int], most: int = MOST) -> tuple[tuple[str, ...], list[int]]:
    """Name the parts of training, and the part that each step belongs to; epochs are named from 1.

    >>> spans([0, 0, 1, 1, 2])
    (('epoch 1', 'epoch 2', 'epoch 3'), [0, 0, 1, 1, 2])
    >>> spans([0, 1, 2, 3, 4], most=3)
    (('epochs 1 to 2', 'epochs 3 to 4', 'epoch 5'), [0, 0, 1, 1, 2])
    >>> spans([0, 0, 0, 0, 0], most=2)
    (('steps 1 to 3', 'steps 4 to 5'), [0, 0, 0, 1, 1])
    """
    what, lengths = "epoch", [len(list(steps)) for _, steps in groupby(epochs)]
    if len(lengths) == 1:
        what, lengths = "step", [1] * len(epochs)
    width = -(-len(lengths) // most)
    names, column = [], []
    for number, start in enumerate(range(0, len(lengths), width)):
        stop = min(start + width, len(lengths))
        names.append(f"{what} {stop}" if stop == start + 1 else f"{what}s {start + 1} to {stop}")
        column += [number] * sum(lengths[start:stop])
    return tuple(names), column
