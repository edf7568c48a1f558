"""Exact replay: the recorded run trained again with some examples left out, many such models side by side."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from leaveout._util.trees import PARAM, Params, State, distance, each, norm
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, LeaveoutWarning
from leaveout.task.batches import Batch
from leaveout.task.batching import looped
from leaveout.task.derivatives import stacked_gradients
from leaveout.task.task import Task
from leaveout.trajectory.left_out import LeftOut
from leaveout.trajectory.recorded_step import RecordedStep
from leaveout.trajectory.trajectory import Trajectory

LARGE = 1_000_000
"""Bytes that a batch leaves for its backward pass, above which a stack of convolutions takes longer than a loop."""


def counterfactuals(
    trajectory: Trajectory,
    left_out: LeftOut,
    weight: float,
    resources: Resources,
    cost: Cost,
    *,
    start: State | None = None,
) -> Params:
    """Final parameters of the run again, once for each row with its examples weighted ``weight``, and once with none.

    The models are trained side by side; the last of the stack is the one with every example, whose way must be the
    recorded one. With ``start`` all of them begin there instead of at the recorded start, and take another way.
    """
    if start is not None:
        return final(trajectory, copies(start, len(left_out) + 1), partial(_weights, left_out, weight), resources, cost)
    params: Params = {}
    for _, params in courses(trajectory, left_out, weight, resources, cost):  # noqa: B007 - the last one counts
        pass
    return params


def courses(
    trajectory: Trajectory, left_out: LeftOut, weight: float, resources: Resources, cost: Cost
) -> Iterator[tuple[RecordedStep, Params]]:
    """The trainings of ``counterfactuals`` on their way: each step with all models' parameters after it.

    The tensors change in place with the next step.
    """
    start = copies(trajectory.initial(), len(left_out) + 1)
    travelled, strayed = 0.0, False
    for recorded, state in stacked(trajectory, start, partial(_weights, left_out, weight), resources, cost):
        travelled += distance(recorded.after[PARAM], recorded.before[PARAM])
        whole = {slot: {name: tensor[-1] for name, tensor in params.items()} for slot, params in state.items()}
        share = trajectory.check.way(recorded, whole, travelled)
        if share is not None and not strayed:
            strayed = True
            _warn_of_rounding(recorded.record.index, share)
        yield recorded, trajectory.scored(state)


def _check_statistics(task: Task, params: Params, step: int) -> None:
    """Refuse a batch of which BatchNorm is left with one value, whose variance is not defined."""
    if not all(bool(torch.isfinite(params[name]).all()) for name in task.buffers):
        raise InputError(
            f"At step {step}, after leaving examples out, a batch has a single value per channel, and BatchNorm has no "
            "variance of that (PyTorch raises an error for it): train with larger batches (drop_last=True), leave "
            "fewer examples of one batch out, or keep them in the statistics with Task(statistics='stay').",
            code="batch-norm-single-value",
        )


def stacked(
    trajectory: Trajectory, state: State, weights: Callable[[Tensor, Tensor], Tensor], resources: Resources, cost: Cost
) -> Iterator[tuple[RecordedStep, State]]:
    """Take every recorded step with a stack of models: each step with all models' states after it.

    ``weights(ids, like)`` has the examples' weights at a step, a row per model, in the dtype of ``like``. The state is
    changed in place.
    """
    ways: dict[Task, Callable[..., Params]] = {}  # one for each mode that the steps were taken in
    like = next(iter(state[PARAM].values()))
    for recorded in resources.track(trajectory.forward(), len(trajectory), f"replaying {len(like) - 1}"):
        if recorded.trained not in ways:
            ways[recorded.trained] = _way(recorded.trained, state[PARAM], recorded.batch)
        gradients = ways[recorded.trained]
        now = weights(recorded.record.ids, next(iter(state[PARAM].values())))
        state = trajectory.rule.steps_(state, gradients(state[PARAM], now, recorded.batch), recorded.record.hypers)
        cost.gradients += len(now)
        _check_statistics(trajectory.task, state[PARAM], recorded.record.index)
        yield recorded, state


def final(
    trajectory: Trajectory, start: State, weights: Callable[[Tensor, Tensor], Tensor], resources: Resources, cost: Cost
) -> Params:
    """Give all models' parameters at the end of ``stacked``."""
    end = start
    for _, end in stacked(trajectory, start, weights, resources, cost):  # noqa: B007 - the last one counts
        pass
    return trajectory.scored(end)


def moved_start(trajectory: Trajectory, jitter: float, seed: int) -> State:
    """θ_0 + jitter·‖θ_0‖·ε/‖ε‖ with ε normal by ``seed``; the optimizer's own state stays.

    Where the run starts at zero, ‖θ_N‖ takes the place of ‖θ_0‖.
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
    """As ``counterfactuals`` with weight zero, but in a fresh order: each epoch the examples change places at random.

    Start, step sizes and batch sizes are the recorded ones; with all examples this is another run, not the recorded.
    """
    state, count = copies(trajectory.initial(), len(left_out) + 1), len(left_out) + 1
    task, order = trajectory.task, torch.Generator().manual_seed(seed)
    ways: dict[Task, Callable[..., Params]] = {}
    epoch, places = None, torch.arange(task.size)
    for index in resources.track(range(len(trajectory)), len(trajectory), f"training {count}"):
        record = trajectory.run.record(index)
        if record.epoch != epoch:
            epoch, places = record.epoch, torch.randperm(task.size, generator=order)
        ids = places[record.ids]
        batch = trajectory.shuffled(record, ids, {name: tensor[-1] for name, tensor in state[PARAM].items()})
        weights = _weights(left_out, 0.0, ids, next(iter(state[PARAM].values())))
        trained = trajectory.trained_at(record)
        if trained not in ways:
            ways[trained] = _way(trained, state[PARAM], batch)
        gradients = ways[trained]
        state = trajectory.rule.steps_(state, gradients(state[PARAM], weights, batch), record.hypers)
        cost.gradients += count
    return trajectory.scored(state)


def copies(state: State, count: int) -> State:
    """Stack ``count`` copies of a state, to be changed in place."""
    return {
        slot: {name: tensor.expand(count, *tensor.shape).clone() for name, tensor in params.items()}
        for slot, params in state.items()
    }


def _weights(left_out: LeftOut, weight: float, ids: Tensor, like: Tensor) -> Tensor:
    weights = like.new_ones((len(like), len(ids)))
    row, position = left_out.pairs(ids)
    weights[row, position] = weight
    return weights


def _way(task: Task, params: Params, batch: Batch) -> Callable[..., Params]:
    """How many models' gradients are taken: all at once, or one after the other.

    The first is quicker but for convolutions of some size, whose weights cannot be joined into one product. The choice
    depends on nothing but the task, so that the same replay has the same rounding wherever and whenever it is done.
    """
    convolutions = any(isinstance(module, nn.modules.conv._ConvNd) for module in task.model.modules())
    alone = {name: tensor[0] for name, tensor in params.items()}
    # Casts inside vmap would round in another way than in training.
    if (
        task.autocast is not None
        or not task.abilities.stacks
        or (convolutions and task.footprint(alone, batch) > LARGE)
    ):
        return looped(task.gradient, (0, 0, None))
    return partial(stacked_gradients, task)
