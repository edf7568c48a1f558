"""Replay: repeat the run without the example. The ground truth that the estimators are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leaveout._util.trees import Params, each
from leaveout.errors import InputError, check_seed
from leaveout.estimators.base import Estimator, titled
from leaveout.estimators.question import Question
from leaveout.estimators.request import Request
from leaveout.scores import SELF, Scores
from leaveout.sweep import budget
from leaveout.trajectory.left_out import LeftOut
from leaveout.trajectory.replay import counterfactuals, moved_start
from leaveout.trajectory.stack import steps_one_by_one

JITTER = 1e-3
"""The relative size of a perturbation of the initial parameters."""


@dataclass(frozen=True)
class Replay(Estimator):
    """s' ← F_i(s'; w^{−k}): same start, same batches, same order, the example's weight zero, |Z_i| unchanged.

    Cost: one batch gradient per step and example; the models are trained side by side.

    Args:
        ids: the examples to leave out, one at a time; all of them by default.
        weight: the weight that a left-out example gets instead of one.
        move: the seed of a perturbation of the start: all models, including the one with every example, begin at a
            random step of relative size ``jitter`` from the recorded start. The scores are then not exact for the
            recorded run; compared with its scores they show how reproducible an example's effect is.
        jitter: ‖step‖/‖θ_0‖.
    """

    ids: Sequence[int] | Tensor | np.ndarray | None = None
    weight: float = 0.0
    move: int | None = None
    jitter: float = JITTER
    differentiates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.move is not None:
            check_seed(self.move)
        if not (isinstance(self.jitter, int | float) and 0 < self.jitter < 1):
            raise InputError(
                f"jitter={self.jitter!r} is not a relative size: give a number between 0 and 1, such as 1e-3.",
                code="jitter-out-of-range",
            )

    @property
    def name(self) -> str:
        """The method's name."""
        moved = None if self.move is None else f"move {self.move} of {self.jitter:g}"
        return titled("Replay", {"weight": f"weight {self.weight:g}" if self.weight else None, "move": moved})

    def _left_out(self, question: Question) -> LeftOut:
        if self.ids is not None and (question.ids is not None or question.groups is not None):
            raise InputError(
                "Replay(ids=...) was given, and ids= or groups= as well: give one of them.", code="ids-given-twice"
            )
        own = question if self.ids is None else replace(question, ids=cast("Sequence[int]", self.ids))
        return super()._left_out(own)

    def _exact(self, values: Float[Tensor, "rows queries"]) -> Bool[Tensor, " rows"] | None:
        return torch.ones(len(values), dtype=torch.bool) if self.weight == 0 and self.move is None else None

    def values(self, request: Request) -> tuple[Tensor, Params | None]:
        """Return the scores, and the displacements if requested."""
        # Each stack has one more model, the one with all examples, in the other half of the budget.
        trajectory, resources = request.trajectory, request.resources
        bytes_each = budget.replay_bytes(trajectory)
        if steps_one_by_one(trajectory.trained, trajectory.activations):
            # Models that are taking a step hold activations; those that wait hold only their state.
            stepping, waiting = torch.get_num_threads() * bytes_each, budget.model_bytes(trajectory)
            if resources.memory == "auto" or resources.bytes >= stepping + 2 * waiting:
                bytes_each, request = waiting, replace(request, resources=resources.without(stepping))

        def replays(shard: Request) -> tuple[Tensor, Params | None]:
            trajectory = shard.trajectory
            start = None if self.move is None else moved_start(trajectory, self.jitter, self.move)
            params = counterfactuals(trajectory, shard.left_out, self.weight, shard.resources, shard.cost, start=start)
            losses = shard.query.losses(params)
            # Compared with the model with all examples in the same stack, so that rounding errors cancel.
            values = shard.query.reduce(losses[:-1] - losses[-1:])
            return values, each(lambda tensor: tensor[:-1] - tensor[-1:], params) if shard.displacements else None

        return request.rows(replays, bytes_each, "replaying", least=2 * bytes_each)


def replayed(scores: Scores, rows: Sequence[int], question: Question, replay: Replay | None = None) -> Scores:
    """Replay some rows of scores; ``replay`` says from which start.

    ``question`` has the run, the task, the query set and the resources; the queries are those that were scored.
    """
    replay = replay or Replay()
    scores.check_same_run(question.run)
    scores.check_same_measure(question.task.measure)
    names = [scores.train_ids[row] for row in rows]
    if scores.queries == SELF:
        ids = [int(name) for name in names]
        return replay.self_influence(question.run, question.task, ids=ids, resources=question.resources)
    if scores.groups is None:
        question = replace(question, queries=scores.queries, ids=[int(name) for name in names])
    else:
        groups = {str(name): scores.groups[str(name)] for name in names}
        question = replace(question, queries=scores.queries, groups=groups)
    truth = replay.answer(question)
    scores.check_same_queries(truth)
    return truth
