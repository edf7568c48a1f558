"""How much memory vectors need in a sweep through a run, and how a budget is divided.

Half of a budget is for the vectors that are carried, half for the products that some of them go through at a time. The
counts below are of tensors that are alive at the same time, with room for an operation's temporary tensors; they are
measured in ``tests/test_memory.py``.
"""

from __future__ import annotations

import torch

from leaveout._util.trees import PARAM, nbytes
from leaveout.compute.resources import Resources
from leaveout.task.execution import Chunks
from leaveout.trajectory.stack import LARGE
from leaveout.trajectory.trajectory import Trajectory

NONLINEAR = 24
"""Vectors that a step that is not linear in the gradient (Adam's) needs to compute its derivative."""

ONCE, TWICE = 10, 20
"""How many times a first and a second derivative hold the activations of a forward pass, with what the allocator loses.

Measured on five small models: 4 to 19 for a gradient, 5 to 25 for its derivative along a vector; the most for a linear
layer, whose only activations are its outputs, and for LayerNorm. So both are compromises, not bounds.
"""

TRACED = 32
"""Products with single vectors for which a trace in two stages pays off."""


def param_bytes(trajectory: Trajectory) -> int:
    """Count the bytes of one vector of the parameters."""
    return nbytes({PARAM: trajectory.initial()[PARAM]})


def product_bytes(trajectory: Trajectory) -> int:
    """Count the bytes of one vector in a product: the batch's activations and their derivatives, and itself."""
    return TWICE * trajectory.activations + 6 * param_bytes(trajectory)


def weight_bytes(trajectory: Trajectory) -> int:
    """Count the bytes of one weight per example of a batch."""
    like = next(iter(trajectory.initial()[PARAM].values()))
    return len(trajectory.run.record(0).ids) * like.element_size()


def backward_bytes(trajectory: Trajectory) -> int:
    """Count the bytes of one query vector going backward: itself, states around a step, the product and its parts."""
    return 2 * nbytes(trajectory.initial()) + _passing(trajectory, 8) + 3 * weight_bytes(trajectory)


def forward_bytes(trajectory: Trajectory) -> int:
    """Count the bytes of one displacement going forward: states around a step, what is added, its examples' weights."""
    return 2 * nbytes(trajectory.initial()) + _passing(trajectory, 8) + 4 * weight_bytes(trajectory)


def replay_bytes(trajectory: Trajectory) -> int:
    """Count the bytes of one model trained alongside others: its state, its gradient, the batch's activations."""
    own = nbytes(trajectory.initial()) + _passing(trajectory, 4) + 2 * weight_bytes(trajectory)
    return ONCE * trajectory.activations + own


def model_bytes(trajectory: Trajectory) -> int:
    """Count the bytes of a model that waits while others step: its state, and its parameters in the final stack."""
    return nbytes(trajectory.initial()) + 3 * param_bytes(trajectory) + 2 * weight_bytes(trajectory)


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


def chunks(resources: Resources, trajectory: Trajectory, count: int) -> Chunks:
    """Return how the products of ``count`` vectors going backward are computed."""
    together, apart = chunk(resources, trajectory, count), threads(resources, trajectory, count)
    return Chunks(together, examples(resources, trajectory), apart)


def threads(resources: Resources, trajectory: Trajectory, count: int) -> int | None:
    """Return how many of the vectors go through a product at a time where they go one by one; None: all together.

    One by one is faster for large models, but needs a trace, which has to pay off. Which of the two depends on the
    run's length and first batch and on the number of vectors alone.
    """
    few = count > 1 and count * len(trajectory) < TRACED and not trajectory.objective.execution.images
    if trajectory.activations <= LARGE or few:
        return None
    return chunk(resources, trajectory, cores(trajectory.objective.device))


def cores(device: torch.device) -> int:
    """Return how many threads compute at a time: those of the processor; elsewhere one gives out the work."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def examples(resources: Resources, trajectory: Trajectory) -> int:
    """Return how many per-example gradients are taken at a time: each has its share of the batch's activations."""
    count = len(trajectory.run.record(0).ids)
    return resources.chunk(2 * (ONCE * trajectory.activations // count + 4 * param_bytes(trajectory)), count)


def check(resources: Resources, trajectory: Trajectory, bytes_each: int, what: str) -> None:
    """Refuse a budget that does not hold one vector and its product."""
    resources.check(bytes_each + product_bytes(trajectory), what)


def _passing(trajectory: Trajectory, count: int) -> int:
    return (count if trajectory.rule.linear else count + NONLINEAR) * param_bytes(trajectory)
