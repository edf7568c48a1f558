"""What vectors need in memory on their way through a run: how a budget is shared out.

Half of a budget is for the vectors that are on their way, half for the products that some of them go through at a
time. The counts below are of tensors that are alive together, with room for those that an operation makes in passing;
measured in ``tests/test_memory.py``.
"""

from __future__ import annotations

from leaveout._util.trees import PARAM, nbytes
from leaveout.compute.resources import Resources
from leaveout.trajectory.trajectory import Trajectory

NONLINEAR = 24
"""Vectors that a step which is not linear in the gradient (Adam's) makes on the way to its derivative."""


def param_bytes(trajectory: Trajectory) -> int:
    """One vector of the parameters."""
    return nbytes({PARAM: trajectory.initial()[PARAM]})


def product_bytes(trajectory: Trajectory) -> int:
    """One vector in a product: the batch's activations a few times, and itself."""
    task = trajectory.task
    held = task.footprint(trajectory.final_whole()[PARAM], trajectory.batch(0))
    return 4 * held + 6 * param_bytes(trajectory)


def backward_bytes(trajectory: Trajectory) -> int:
    """One query vector going back: itself, its state before and after a step, the product, its parts and their sum."""
    return 2 * nbytes(trajectory.initial()) + _passing(trajectory, 8)


def forward_bytes(trajectory: Trajectory) -> int:
    """One displacement going forward: its state before and after a step, what is added to it, and its left-out rows."""
    return 2 * nbytes(trajectory.initial()) + _passing(trajectory, 8)


def replay_bytes(trajectory: Trajectory) -> int:
    """One model trained beside others: its state, its gradient, the batch's activations."""
    state = trajectory.initial()
    held = trajectory.task.footprint(state[PARAM], trajectory.batch(0))
    return 4 * held + nbytes(state) + _passing(trajectory, 4)


def pair_bytes(trajectory: Trajectory) -> int:
    """One row's displacement where its example is met: its state, the example's gradient and products, and copies."""
    own = product_bytes(trajectory) // len(trajectory.run.record(0).ids) + 10 * param_bytes(trajectory)
    return 3 * nbytes(trajectory.initial()) + own


def chunk(resources: Resources, trajectory: Trajectory, count: int) -> int:
    """How many of ``count`` vectors go through a product at a time."""
    return resources.chunk(2 * product_bytes(trajectory), count)


def check(resources: Resources, trajectory: Trajectory, held: int, what: str) -> None:
    """Refuses a budget that does not hold one vector and its product."""
    resources.check(held + product_bytes(trajectory), what)


def _passing(trajectory: Trajectory, count: int) -> int:
    return (count if trajectory.rule.linear else count + NONLINEAR) * param_bytes(trajectory)
