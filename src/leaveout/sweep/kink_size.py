"""How much the curvature of kinks does to a step, which tells whether it can be taken for curvature at all.

A kink's curvature is an average over examples that cross it a little. Where the kinks of one batch change a vector by
half of its length in a single step, and do so all along the run, they are crossed in leaps by single examples, and
there is no average: vectors carried with that curvature grow without bound, and their scores are worthless.
"""

from __future__ import annotations

import torch

from leaveout._util.trees import PARAM, Params, each, embed, norm
from leaveout.sweep.curvature import Curvature, Hessian, KinkedHessian
from leaveout.sweep.linear_step import LinearStep
from leaveout.task.derivatives import kink_widths
from leaveout.trajectory.recorded_step import RecordedStep
from leaveout.trajectory.trajectory import Trajectory

LARGEST = 0.4
"""The size from which on kinks are left without curvature."""

STEPS = 8
"""Steps that are looked at."""

ROUNDS = 3
"""Rounds of power iteration; more of them raise the size by a tenth or so."""


def hessian(kinks: bool | str, trajectory: Trajectory) -> type[Curvature]:
    """Choose the Hessian, with the curvature of kinks or without, or, for ``"auto"``, as the run calls for."""
    return KinkedHessian if (are_mild(trajectory) if kinks == "auto" else kinks) else Hessian


def are_mild(trajectory: Trajectory) -> bool:
    """Say whether the model has kinks whose curvature can be trusted; measured once per run and task."""
    known, run = trajectory.task.kink_sizes, (trajectory.run.fingerprint, len(trajectory))
    if run not in known:
        known[run] = kink_size(trajectory)
    size = known[run]
    return size is not None and size < LARGEST


def kink_size(trajectory: Trajectory) -> float | None:
    """‖∂F_kinks − ∂F‖ in the parameters, which three quarters of a few steps reach; None where there are no kinks.

    Not their mean: a few steps with large kinks do no harm.
    """
    kept = [index for index in trajectory.run.kept if index < len(trajectory)]
    count = min(len(kept), STEPS)
    sizes = []
    for part in range(count):
        recorded = trajectory.recorded_step(kept[(2 * part + 1) * len(kept) // (2 * count)])
        if not kink_widths(recorded.task, recorded.params, recorded.batch):
            return None
        sizes.append(_size(trajectory, recorded))
    return float(torch.tensor(sizes).quantile(0.25))


def _size(trajectory: Trajectory, recorded: RecordedStep) -> float:
    """The largest stretch of (∂F_kinks − ∂F)ᵀ at one step, by power iteration."""
    order = torch.Generator().manual_seed(0)
    vector = {
        name: torch.randn((1, *tensor.shape), generator=order, dtype=torch.float64).to(tensor)
        if name in trajectory.rule.groups
        else torch.zeros_like(tensor)[None]  # a buffer of the model's
        for name, tensor in recorded.before[PARAM].items()
    }
    size = 0.0
    for _ in range(ROUNDS):
        length = norm(vector)
        vector = _difference(trajectory, recorded, {name: tensor / length for name, tensor in vector.items()})
        size = norm(vector)
        if not size > 0:
            return size  # nothing near its kink, or not a number
    return size


def _difference(trajectory: Trajectory, recorded: RecordedStep, vector: Params) -> Params:
    """(∂F_kinks − ∂F)ᵀ·u, without what it does to the optimizer's own state."""
    task, vectors = trajectory.task, embed(vector, recorded.before)
    curved, plain = (
        LinearStep(trajectory.rule, recorded, kind(task, recorded.params, recorded.batch)).pull(vectors).state[PARAM]
        for kind in (KinkedHessian, Hessian)
    )
    return each(torch.sub, curved, plain)
