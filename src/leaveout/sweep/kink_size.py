"""How much the curvature of kinks changes a step, which tells whether it can be treated as curvature at all.

A kink's curvature is an average over examples that cross it by a little. If the kinks of one batch change a vector by
half its length in a single step, and do so throughout the run, they are crossed in leaps by single examples, and there
is no average: vectors carried with that curvature grow without bound, and the scores are worthless.
"""

from __future__ import annotations

import torch

from leaveout._util.trees import PARAM, Params, each, embed, norm
from leaveout.compute.clock import Clock
from leaveout.diff.hessian import Hessian, KinkedHessian, kink_widths
from leaveout.diff.operator import StepOperator
from leaveout.sweep.linear_step import LinearStep
from leaveout.trajectory.recorded_step import RecordedStep
from leaveout.trajectory.trajectory import Trajectory

LARGEST = 0.4
"""The size from which kinks are left without curvature."""

LARGEST_DIVIDED = 0.07
"""The same for steps that divide by a root, as Adam's do; both come from the experiments ``kinks``, ``adam-kinks``."""

STEPS = 8
"""The number of steps that are examined."""

ROUNDS = 3
"""Rounds of power iteration; more of them increase the size by a tenth or so."""


def hessian(kinks: bool | str, trajectory: Trajectory) -> type[StepOperator]:
    """Choose the Hessian with or without the curvature of kinks; ``"auto"`` depends on the run."""
    if kinks == "auto":
        kinks = are_mild(trajectory)
    return KinkedHessian if kinks and has_kinks(trajectory.recorded_step(0)) else Hessian


def has_kinks(recorded: RecordedStep) -> bool:
    """Say whether the model calls a function with kinks at this step."""
    return bool(kink_widths(recorded.objective, recorded.params, recorded.batch))


def are_mild(trajectory: Trajectory, clock: Clock | None = None) -> bool:
    """Say whether the model has kinks whose curvature can be trusted; measured once per run and objective.

    Raises OutOfTimeError if that would take longer than what is left on the clock.
    """
    question = ("kinks", trajectory.run.fingerprint, len(trajectory), trajectory.objective)
    size = trajectory.objective.execution.memory.recall(question, lambda: kink_size(trajectory, clock))
    return size is not None and size < (LARGEST_DIVIDED if trajectory.rule.divides else LARGEST)


def kink_size(trajectory: Trajectory, clock: Clock | None = None) -> float | None:
    """Measure the ‖∂F_kinks − ∂F‖ in the parameters that three quarters of a few steps reach; None without kinks.

    This is not the mean: a few steps with large kinks do no harm.
    """
    kept = [index for index in trajectory.run.kept if index < len(trajectory)]
    count = min(len(kept), STEPS)
    sizes = []
    for part in range(count) if clock is None else clock.watch(range(count), count):
        recorded = trajectory.recorded_step(kept[(2 * part + 1) * len(kept) // (2 * count)])
        if not has_kinks(recorded):
            return None
        sizes.append(_size(trajectory, recorded))
    return float(torch.tensor(sizes).quantile(0.25))


def _size(trajectory: Trajectory, recorded: RecordedStep) -> float:
    """Estimate how much (∂F_kinks − ∂F)ᵀ stretches a vector at one step at most, by power iteration."""
    order = torch.Generator().manual_seed(0)
    vector = {
        name: torch.randn((1, *tensor.shape), generator=order, dtype=torch.float64).to(tensor)
        if name in trajectory.rule.groups
        else torch.zeros_like(tensor)[None]  # a buffer of the model
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
    """Compute (∂F_kinks − ∂F)ᵀ·u in the parameters, without its part in the optimizer state."""
    objective, vectors = trajectory.objective, embed(vector, recorded.before)
    curved, plain = (
        LinearStep(trajectory.rule, recorded, kind(objective, recorded.params, recorded.batch))
        .pull(vectors)
        .state[PARAM]
        for kind in (KinkedHessian, Hessian)
    )
    return each(torch.sub, curved, plain)
