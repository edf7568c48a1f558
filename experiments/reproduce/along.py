"""Scores and truth along one run, after given numbers of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from experiments.reproduce.problems import QUIET, Problem
from leaveout._util.trees import PARAM, Params
from leaveout.compute.cost import Cost
from leaveout.estimators.query import Query
from leaveout.estimators.readout import readout_of
from leaveout.sweep.sweep import Sweep
from leaveout.trajectory.left_out import leave_out
from leaveout.trajectory.replay import replayed_states
from leaveout.trajectory.trajectory import Trajectory


def displaced(problem: Problem, marks: Sequence[int], *, corrected: bool) -> Iterator[tuple[int, Params]]:
    """Estimate every example's displacement after each number of steps, from one sweep: SGD-IE's or exact ACC's."""
    sweep = Sweep(Trajectory(problem.run, problem.task), corrected=corrected)
    for recorded, moved in sweep.course(leave_out(problem.task.size), QUIET, Cost()):
        if recorded.record.index + 1 in marks:
            yield recorded.record.index + 1, moved[PARAM]


def replayed(problem: Problem, marks: Sequence[int]) -> Iterator[tuple[int, Params]]:
    """Compute every example's true displacement after each number of steps, from one stack of trainings."""
    trajectory = Trajectory(problem.run, problem.task)
    for recorded, params in replayed_states(trajectory, leave_out(problem.task.size), 0.0, QUIET, Cost()):
        if recorded.record.index + 1 in marks:
            yield recorded.record.index + 1, {name: tensor[:-1] - tensor[-1:] for name, tensor in params.items()}


def changes(problem: Problem, step: int, moved: Params, readout: str) -> Tensor:
    """Compute the change of the mean query loss for displacements after some steps, by a readout."""
    query = Query(problem.task, problem.run.state(step)[PARAM], problem.val, single=False)
    return readout_of(readout).of_displacements(query, moved).mean(1)
