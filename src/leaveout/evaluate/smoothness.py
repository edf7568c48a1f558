"""Metasmoothness: whether the result of a training is smooth in the examples' weights, tested before any scoring."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leaveout._util.trees import Params, each, flat_rows
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, LeaveoutWarning, MismatchError, UnsupportedError, check_seed, is_whole
from leaveout.run.reader import Run
from leaveout.sweep import budget
from leaveout.sweep.stability import LIMIT, Growth
from leaveout.sweep.sweep import Sweep
from leaveout.task.task import Task
from leaveout.trajectory.replay import final
from leaveout.trajectory.trajectory import Trajectory

SMOOTH, ROUGH = 0.8, 0.4
"""Linearised scores usually rank well if the agreement is at least the first, and do not below the second."""

KINKED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Hardtanh, nn.Hardswish, nn.Threshold, nn.MaxPool2d)

ACTIVATIONS, RATE, DECAY, BATCH, EPS = (
    "smooth activations (GELU or tanh in place of ReLU)",
    "a smaller learning rate",
    "a learning rate that decays to zero",
    "larger batches",
    "a larger eps",
)
ORDER = (ACTIVATIONS, RATE, EPS, BATCH, DECAY)
"""What to change in a training, in the order of how much it helped in the experiment ``smoothness``."""


@dataclass(frozen=True)
class Smoothness:
    """How smooth a training is in the weights of its examples.

    ``agreement`` is the mean of ``per_direction``: 1 if the parameters move on a straight line as the weights change,
    0 or less if the second part of the way is unrelated to the first, NaN if they do not move. ``growth`` is the factor
    by which a vector grows when it is transported back through the linearised run, between the steps ``steps``; NaN if
    the run cannot be linearised. ``advice`` is what to change in the training, what helped most first.
    """

    agreement: float
    per_direction: tuple[float, ...]
    growth: float
    steps: tuple[int, int]
    advice: tuple[str, ...]
    cost: Cost = field(default_factory=Cost)

    @property
    def smooth(self) -> bool:
        """Say whether linearised scores can be expected to rank well."""
        return self.agreement >= SMOOTH and not self.growth > LIMIT

    @property
    def sentence(self) -> str:
        """What was measured, what it means for scores, and what to do, in words."""
        if math.isnan(self.agreement):
            return "The weights of the examples change nothing in this training: train with a learning rate above zero."
        if self.agreement >= SMOOTH:
            words = "this training is smooth in its examples' weights"
            meaning = "linearised scores can hold"
        elif self.agreement >= ROUGH:
            words = "this training is only roughly smooth in its examples' weights"
            meaning = "linearised scores of single examples will be right overall at best"
        else:
            words = "this training is not smooth in its examples' weights"
            meaning = "no linearised score of single examples can hold"
        words = f"{words} (metasmoothness {self.agreement:.2f} of 1): {meaning}"
        if self.growth > LIMIT:
            times = "without bound" if math.isinf(self.growth) else f"{self.growth:.1g}-fold"
            words += f", and from step {self.steps[0]} to step {self.steps[1]} carried vectors grow {times}"
        if not self.smooth:
            words += f"; train with {listed(self.advice)} (what helped most first), or look at groups and replays"
        return f"{words[0].upper()}{words[1:]}."

    def __str__(self) -> str:
        return self.sentence


def smoothness(
    run: Run,
    task: Task,
    *,
    directions: int = 4,
    h: float | None = None,
    seed: int = 0,
    resources: Resources | None = None,
) -> Smoothness:
    """Compute Σ_i |Δ_i| sign(Δ_i) sign(Δ'_i)/‖Δ‖₁, Δ = A(1 + hv) − A(1), Δ' = A(1 + 2hv) − A(1 + hv): metasmoothness.

    A(w) are the parameters that the recorded run ends with under example weights w, v is a random ±1 per example. The
    models, two per direction and one with all weights one, are replayed side by side. By default h = 1/√n, with which
    the weights change by as much, ‖hv‖ = 1, as when one example is left out. One backward sweep of Δ (an HVP per step)
    shows how transported vectors grow.

    Args:
        run: the recorded run.
        task: what was trained.
        directions: how many random directions.
        h: the step in the weights.
        seed: for the directions.
        resources: memory budget and progress.
    """
    if not is_whole(directions, 1):
        raise InputError(
            f"directions={directions!r} must be a whole number of at least 1.", code="directions-not-a-count"
        )
    if h is not None and not (isinstance(h, int | float) and 0 < h < math.inf):
        raise InputError(f"h={h!r} is not a step: give a number above 0, or None.", code="weight-step-out-of-range")
    resources, cost = (resources or Resources()).on(task.device), Cost()
    h = 1 / math.sqrt(task.size) if h is None else h
    order = torch.Generator().manual_seed(check_seed(seed))
    signs = torch.randint(2, (directions, task.size), generator=order) * 2.0 - 1
    with cost.metered(task.device):
        trajectory = Trajectory(run, task).compared()
        resources.check(3 * budget.replay_bytes(trajectory), "a direction")
        size = resources.chunk(4 * budget.replay_bytes(trajectory), directions)
        measured = [_measured(trajectory, part, h, resources, cost) for part in signs.split(size)]
        agreements = torch.cat([part for part, _ in measured]).tolist()
        growth = _growth(trajectory, measured[0][1], resources, cost)
    return Smoothness(sum(agreements) / directions, tuple(agreements), *growth, advice(run, task), cost)


def _measured(
    trajectory: Trajectory, signs: Float[Tensor, "directions n"], h: float, resources: Resources, cost: Cost
) -> tuple[Float[Tensor, " directions"], Params]:
    """Return the agreement along each direction, and Δ of the first."""
    table = torch.cat([1 + h * signs, 1 + 2 * h * signs, torch.ones_like(signs[:1])])
    start = trajectory.initial()
    ends = final(trajectory, start, len(table), lambda ids, like: table[:, ids].to(like), resources, cost)
    count = len(signs)
    first = each(lambda stack: stack[:count] - stack[-1:], ends)
    second = each(lambda stack: stack[count:-1] - stack[:count], ends)
    trained = list(trajectory.rule.groups)  # not the model's buffers
    a, b = (torch.cat([flat_rows(part[name]).double() for name in trained], dim=1) for part in (first, second))
    agreement = (a * b.sign()).sum(1) / a.abs().sum(1)  # NaN if nothing moves
    return agreement, each(lambda stack: stack[:1], first)


def _growth(trajectory: Trajectory, vector: Params, resources: Resources, cost: Cost) -> tuple[float, tuple[int, int]]:
    """Return by how much a vector grows in the backward sweep, and where."""
    growth = Growth(trajectory.objective)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LeaveoutWarning)  # the result reports it
        try:
            for recorded, pulled in Sweep(trajectory).pulled(vector, resources, cost):
                growth.note(recorded, pulled.state)
        except UnsupportedError:
            return math.nan, (-1, -1)
        except MismatchError as error:
            if error.code != "sweep-overflow":
                raise
            return math.inf, growth.steps
    return growth.most, growth.steps


def advice(run: Run, task: Task) -> tuple[str, ...]:
    """List what can be changed in this training, what helped most first."""
    last = run.record(len(run) - 1).hypers
    first = run.record(0).hypers
    void = set()
    if not any(isinstance(module, KINKED) for module in task.model.modules()):
        void.add(ACTIVATIONS)
    if not any("eps" in group for group in last):
        void.add(EPS)
    if all(now["lr"] < 0.2 * then["lr"] for now, then in zip(last, first, strict=True)):
        void.add(DECAY)
    if len(run.record(0).ids) >= task.size:
        void.add(BATCH)
    return tuple(word for word in ORDER if word not in void)


def listed(words: tuple[str, ...]) -> str:
    """Join words.

    >>> listed(("a", "b", "c"))
    'a, b or c'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
