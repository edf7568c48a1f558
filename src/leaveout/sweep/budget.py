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
    """Count the bytes of one vector of the parameters."""
    return nbytes({PARAM: trajectory.initial()[PARAM]})


def product_bytes(trajectory: Trajectory) -> int:
    """Count the bytes of one vector in a product: the batch's activations a few times, and itself."""
    task = trajectory.task
    activations = task.footprint(trajectory.final_whole()[PARAM], trajectory.batch(0))
    return 4 * activations + 6 * param_bytes(trajectory)


def backward_bytes(trajectory: Trajectory) -> int:
    """Count the bytes of one query vector going back: itself, its states around a step, the product and its parts."""
    return 2 * nbytes(trajectory.initial()) + _passing(trajectory, 8)


def forward_bytes(trajectory: Trajectory) -> int:
    """Count the bytes of one displacement going forward: its states around a step, what is added, its left-out rows."""
    return 2 * nbytes(trajectory.initial()) + _passing(trajectory, 8)


def replay_bytes(trajectory: Trajectory) -> int:
    """Count the bytes of one model trained beside others: its state, its gradient, the batch's activations."""
    state = trajectory.initial()
    activations = trajectory.task.footprint(state[PARAM], trajectory.batch(0))
    return 4 * activations + nbytes(state) + _passing(trajectory, 4)


def pair_bytes(trajectory: Trajectory) -> int:
    """Count the bytes of one row's displacement at its example: state, the example's gradient and products, copies."""
    own = product_bytes(trajectory) // len(trajectory.run.record(0).ids) + 10 * param_bytes(trajectory)
    return 3 * nbytes(trajectory.initial()) + own


def directions_bytes(trajectory: Trajectory, width: int, samples: int) -> int:
    """Count the bytes of a search for ``width`` directions: sampled states, directions, products, a factorisation."""
    return (samples + 4 * width) * param_bytes(trajectory)


def chunk(resources: Resources, trajectory: Trajectory, count: int) -> int:
    """Return how many of ``count`` vectors go through a product at a time."""
    return resources.chunk(2 * product_bytes(trajectory), count)


def check(resources: Resources, trajectory: Trajectory, bytes_each: int, what: str) -> None:
    """Refuse a budget that does not hold one vector and its product."""
    resources.check(bytes_each + product_bytes(trajectory), what)


def _passing(trajectory: Trajectory, count: int) -> int:
    return (count if trajectory.rule.linear else count + NONLINEAR) * param_bytes(trajectory)
