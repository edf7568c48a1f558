"""Exact replay: retraining along the recorded run with some examples left out, many such models side by side."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from leaveout._util.trees import PARAM, Params, State, distance, each, norm
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, LeaveoutWarning
from leaveout.task.objective import Objective
from leaveout.trajectory.left_out import LeftOut
from leaveout.trajectory.recorded_step import RecordedStep
from leaveout.trajectory.stack import Stack
from leaveout.trajectory.trajectory import Trajectory

Weights: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""The examples' weights at a step, one row per model, from the step's ids and a tensor of the dtype to use."""


def counterfactuals(
    trajectory: Trajectory,
    left_out: LeftOut,
    weight: float,
    resources: Resources,
    cost: Cost,
    *,
    start: State | None = None,
) -> Params:
    """Replay the run, once per row with its examples weighted ``weight`` and once unchanged; return final parameters.

    The models are trained side by side; the last in the stack is the one with every example, which must follow the
    recorded run. With ``start``, all of them begin there instead of at the recorded start, and follow another path.
    """
    weights = partial(_weights, left_out, weight, len(left_out) + 1)
    if start is not None:
        return final(trajectory, start, len(left_out) + 1, weights, resources, cost)
    stack: Stack | None = None
    for _, stack in _checked_replays(trajectory, left_out, weight, resources, cost):  # noqa: B007 - the last one counts
        pass
    return {} if stack is None else trajectory.scored(stack.rows())


def replayed_states(
    trajectory: Trajectory, left_out: LeftOut, weight: float, resources: Resources, cost: Cost
) -> Iterator[tuple[RecordedStep, Params]]:
    """Yield each step of the replays in ``counterfactuals``, with all models' parameters after it."""
    for recorded, stack in _checked_replays(trajectory, left_out, weight, resources, cost):
        yield recorded, trajectory.scored(stack.rows())


def _checked_replays(
    trajectory: Trajectory, left_out: LeftOut, weight: float, resources: Resources, cost: Cost
) -> Iterator[tuple[RecordedStep, Stack]]:
    """Yield each step with all models after it, and compare the one that has every example with the recorded run."""
    count = len(left_out) + 1
    travelled, warned = 0.0, False
    steps = stacked(
        trajectory, trajectory.initial(), count, partial(_weights, left_out, weight, count), resources, cost
    )
    for recorded, stack in steps:
        travelled += distance(recorded.after[PARAM], recorded.before[PARAM])
        share = trajectory.check.drift(recorded, stack.last(), travelled)
        if share is not None and not warned:
            warned = True
            _warn_of_rounding(recorded.record.index, share)
        yield recorded, stack


def _check_statistics(objective: Objective, stack: Stack, step: int) -> None:
    """Refuse a batch that leaves BatchNorm with a single value, whose variance is undefined."""
    if not all(bool(torch.isfinite(tensor).all()) for name in objective.mode.buffers for tensor in stack.each(name)):
        raise InputError(
            f"At step {step}, after leaving examples out, a batch has a single value per channel, and BatchNorm has no "
            "variance of that (PyTorch raises an error for it): train with larger batches (drop_last=True), leave "
            "fewer examples of one batch out, or keep them in the statistics with Task(statistics='stay').",
            code="batch-norm-single-value",
        )


def stacked(
    trajectory: Trajectory, start: State, count: int, weights: Weights, resources: Resources, cost: Cost
) -> Iterator[tuple[RecordedStep, Stack]]:
    """Take every recorded step with ``count`` models from one start; yield each step with all models' states after it.

    ``weights(ids, like)`` gives the examples' weights at a step, one row per model, in the dtype of ``like``.
    """
    stack = Stack(start, count, trajectory.rule, len(trajectory))
    like = next(iter(start[PARAM].values()))
    for recorded in resources.track(trajectory.forward(), len(trajectory), f"replaying {count - 1}"):
        record = recorded.record
        cost.gradients += stack.step(recorded.trained, weights(record.ids, like), recorded.batch, record.hypers)
        _check_statistics(trajectory.objective, stack, record.index)
        yield recorded, stack


def final(
    trajectory: Trajectory, start: State, count: int, weights: Weights, resources: Resources, cost: Cost
) -> Params:
    """Return all models' parameters at the end of ``stacked``."""
    stack = Stack(start, count, trajectory.rule)
    for _, stack in stacked(trajectory, start, count, weights, resources, cost):  # noqa: B007 - the last one counts
        pass
    return trajectory.scored(stack.rows())


def moved_start(trajectory: Trajectory, jitter: float, seed: int) -> State:
    """Return θ_0 + jitter·‖θ_0‖·ε/‖ε‖ with normal ε drawn with ``seed``; the optimizer state does not change.

    If the run starts at zero, ‖θ_N‖ takes the place of ‖θ_0‖.
    """
    state = trajectory.initial()
    trained = {name: state[PARAM][name] for name in trajectory.rule.groups}  # not the model's buffers
    size = norm(trained) or norm({name: trajectory.final()[PARAM][name] for name in trained})
    order = torch.Generator().manual_seed(seed)
    noise = {n: torch.randn(t.shape, generator=order, dtype=torch.float64).to(t) for n, t in trained.items()}
    scale = jitter * size / norm(noise)
    return {**state, PARAM: {**state[PARAM], **each(lambda tensor, move: tensor + scale * move, trained, noise)}}


def _warn_of_rounding(step: int, share: float) -> None:
    warnings.warn(
        f"At step {step} the replay with every example has left the recorded run by {share:.1g} of the way travelled, "
        "by rounding alone: this training magnifies small differences. Replays are compared with that replay, not with "
        "the recorded run, but effects as small as this are noise; train in float64 or with a smaller learning rate "
        "to measure them.",
        LeaveoutWarning,
        stacklevel=2,
    )


def shuffled(trajectory: Trajectory, left_out: LeftOut, seed: int, resources: Resources, cost: Cost) -> Params:
    """Retrain as ``counterfactuals`` does with weight zero, but in a new order: examples are permuted in each epoch.

    The start, step sizes and batch sizes are the recorded ones; with all examples this is another run, not the recorded
    one.
    """
    start, count = trajectory.initial(), len(left_out) + 1
    stack, like = Stack(start, count, trajectory.rule, len(trajectory)), next(iter(start[PARAM].values()))
    size, order = trajectory.task.size, torch.Generator().manual_seed(seed)
    epoch, places = None, torch.arange(size)
    for index in resources.track(range(len(trajectory)), len(trajectory), f"training {count}"):
        record = trajectory.record(index)
        if record.epoch != epoch:
            epoch, places = record.epoch, torch.randperm(size, generator=order)
        ids = places[record.ids]
        batch = trajectory.shuffled(record, ids, stack.last()[PARAM])
        weights = _weights(left_out, 0.0, count, ids, like)
        cost.gradients += stack.step(trajectory.trained_at(record), weights, batch, record.hypers)
    return trajectory.scored(stack.rows())


def _weights(left_out: LeftOut, weight: float, count: int, ids: Tensor, like: Tensor) -> Tensor:
    weights = like.new_ones((count, len(ids)))
    row, position = left_out.pairs(ids)
    weights[row, position] = weight
    return weights
