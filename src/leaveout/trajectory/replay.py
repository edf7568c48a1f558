"""Exact replay: the recorded run trained again with some examples left out, many such models side by side."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from leaveout._util.trees import PARAM, Params, State, distance, each, norm
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.compute.threads import spread
from leaveout.errors import InputError, LeaveoutWarning
from leaveout.task.batches import Batch
from leaveout.task.derivatives import stacked_gradients
from leaveout.task.task import Task
from leaveout.trajectory.left_out import LeftOut
from leaveout.trajectory.recorded_step import RecordedStep
from leaveout.trajectory.trajectory import Trajectory

LARGE = 1_000_000
"""Bytes that a batch leaves for its backward pass, above which a stack of models takes longer than a loop."""

Weights: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""The examples' weights at a step, a row per model, from the step's ids and a tensor of the dtype to be used."""


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
    weights = partial(_weights, left_out, weight, len(left_out) + 1)
    if start is not None:
        return final(trajectory, start, len(left_out) + 1, weights, resources, cost)
    stack: Stack | None = None
    for _, stack in _on_their_way(trajectory, left_out, weight, resources, cost):  # noqa: B007 - the last one counts
        pass
    return {} if stack is None else trajectory.scored(stack.rows())


def courses(
    trajectory: Trajectory, left_out: LeftOut, weight: float, resources: Resources, cost: Cost
) -> Iterator[tuple[RecordedStep, Params]]:
    """The trainings of ``counterfactuals`` on their way: each step with all models' parameters after it."""
    for recorded, stack in _on_their_way(trajectory, left_out, weight, resources, cost):
        yield recorded, trajectory.scored(stack.rows())


def _on_their_way(
    trajectory: Trajectory, left_out: LeftOut, weight: float, resources: Resources, cost: Cost
) -> Iterator[tuple[RecordedStep, Stack]]:
    """The same, with the model that has every example compared with the recorded one after each step."""
    count = len(left_out) + 1
    travelled, strayed = 0.0, False
    steps = stacked(
        trajectory, trajectory.initial(), count, partial(_weights, left_out, weight, count), resources, cost
    )
    for recorded, stack in steps:
        travelled += distance(recorded.after[PARAM], recorded.before[PARAM])
        share = trajectory.check.way(recorded, stack.last(), travelled)
        if share is not None and not strayed:
            strayed = True
            _warn_of_rounding(recorded.record.index, share)
        yield recorded, stack


def _check_statistics(task: Task, params: Params, step: int) -> None:
    """Refuse a batch of which BatchNorm is left with one value, whose variance is not defined."""
    if not all(bool(torch.isfinite(params[name]).all()) for name in task.buffers):
        raise InputError(
            f"At step {step}, after leaving examples out, a batch has a single value per channel, and BatchNorm has no "
            "variance of that (PyTorch raises an error for it): train with larger batches (drop_last=True), leave "
            "fewer examples of one batch out, or keep them in the statistics with Task(statistics='stay').",
            code="batch-norm-single-value",
        )


class Stack:
    """The states of models trained side by side, of which those that are still the same are one.

    A model is that of the last row until the first step at which its weights are not: up to there it need not be
    computed. ``state`` has the last row's model first, then the others in the order in which they went their own way.
    """

    def __init__(self, start: State, count: int) -> None:
        self.state = copies(start, 1)
        self._rows = torch.tensor([count - 1], device=next(iter(start[PARAM].values())).device)
        self._count = count

    def part(self, weights: Tensor) -> Tensor:
        """Part from the last row those whose weights are others, and return the weights in the order of ``state``."""
        if len(self._rows) < self._count:
            differing = (weights != weights[-1]).any(1)
            differing[self._rows] = False
            if len(more := differing.nonzero().flatten()):
                self._rows = torch.cat([self._rows, more])
                self.state = {
                    slot: {name: torch.cat([t, t[:1].expand(len(more), *t.shape[1:])]) for name, t in params.items()}
                    for slot, params in self.state.items()
                }
        return weights[self._rows]

    def last(self) -> State:
        """Return the state of the last row's model."""
        return {slot: {name: tensor[0] for name, tensor in params.items()} for slot, params in self.state.items()}

    def rows(self) -> State:
        """Return every row's state, in the rows' own order."""
        place = torch.zeros(self._count, dtype=torch.int64, device=self._rows.device)
        place[self._rows] = torch.arange(len(self._rows), device=self._rows.device)
        return {slot: {name: t[place] for name, t in params.items()} for slot, params in self.state.items()}


def stacked(
    trajectory: Trajectory, start: State, count: int, weights: Weights, resources: Resources, cost: Cost
) -> Iterator[tuple[RecordedStep, Stack]]:
    """Take every recorded step with ``count`` models from one start: each step with all models' states after it.

    ``weights(ids, like)`` has the examples' weights at a step, a row per model, in the dtype of ``like``.
    """
    stack = Stack(start, count)
    ways: dict[Task, Callable[..., Params]] = {}  # one for each mode that the steps were taken in
    like = next(iter(start[PARAM].values()))
    for recorded in resources.track(trajectory.forward(), len(trajectory), f"replaying {count - 1}"):
        now = stack.part(weights(recorded.record.ids, like))
        if recorded.trained not in ways:
            ways[recorded.trained] = _way(recorded.trained, stack.state[PARAM], recorded.batch)
        new = ways[recorded.trained](stack.state[PARAM], now, recorded.batch)
        stack.state = trajectory.rule.steps_(stack.state, new, recorded.record.hypers)
        cost.gradients += len(now)
        _check_statistics(trajectory.task, stack.state[PARAM], recorded.record.index)
        yield recorded, stack


def final(
    trajectory: Trajectory, start: State, count: int, weights: Weights, resources: Resources, cost: Cost
) -> Params:
    """Give all models' parameters at the end of ``stacked``."""
    stack = Stack(start, count)
    for _, stack in stacked(trajectory, start, count, weights, resources, cost):  # noqa: B007 - the last one counts
        pass
    return trajectory.scored(stack.rows())


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
        weights = _weights(left_out, 0.0, count, ids, next(iter(state[PARAM].values())))
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


def _weights(left_out: LeftOut, weight: float, count: int, ids: Tensor, like: Tensor) -> Tensor:
    weights = like.new_ones((count, len(ids)))
    row, position = left_out.pairs(ids)
    weights[row, position] = weight
    return weights


def _way(task: Task, params: Params, batch: Batch) -> Callable[..., Params]:
    """How many models' gradients are taken: all at once, or one after the other on each of the processor's threads.

    The first is quicker for small models, whose operations take less time than to be called. The choice depends on
    nothing but the task, so that the same replay has the same rounding wherever and whenever it is done.
    """
    alone = {name: tensor[0] for name, tensor in params.items()}
    # Casts inside vmap would round in another way than in training.
    if task.autocast is None and task.abilities.stacks and task.footprint(alone, batch) <= LARGE:
        return partial(stacked_gradients, task)
    return partial(_by_threads, _twins(task, _threads(params)))


def _threads(params: Params) -> int:
    on_processor = next(iter(params.values())).device.type == "cpu"
    return torch.get_num_threads() if on_processor else 1


def _twins(task: Task, count: int) -> list[Task]:
    """Return the task and others like it with modules of their own: a call swaps parameters within its modules.

    Where the model cannot be copied there is the task alone.
    """
    twins = [task]
    for _ in range(count - 1):
        twin = task.quiet()
        try:
            twin.called = copy.deepcopy(task.called)
        except Exception:  # noqa: BLE001 - a module may refuse in its own way
            break
        twin.model = twin.called.model
        twins.append(twin)
    return twins


def _by_threads(tasks: Sequence[Task], stack: Params, weights: Tensor, batch: Batch) -> Params:
    """(1/|Z|) Σ w_z g(z) of every model of a stack, each by one of the tasks on a thread of its own."""

    def given(row: int) -> tuple[Params, Tensor, Batch]:
        return {name: tensor[row] for name, tensor in stack.items()}, weights[row], batch

    def gradient_by(task: Task, row: int) -> Params:
        return trace(*given(row)) if trace else _in_range(task, *given(row))

    plain, trace = tasks[0].autocast is None, None
    # A setting of the whole process: no thread may put it back under another. Within casts, training's kernel rounds.
    with sdpa_kernel(SDPBackend.MATH) if plain else nullcontext():
        if plain and tasks[0].abilities.vmap:
            trace = tasks[0].tracer.trace(len(weights), "one gradient", tasks[0].gradient, *given(0))
        rows = spread([partial(gradient_by, task) for task in tasks], range(len(weights)))
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _in_range(task: Task, params: Params, weights: Tensor, batch: Batch) -> Params:
    """ḡ(θ; w); where the recorded scale of a float16 loss overflows with these weights, by half of it, and so on.

    The step was taken, so it is taken here too. A power of two changes no digit of what neither over- nor underflows.
    """
    value = task.gradient(params, weights, batch)
    while task.loss_scale > 1 and not all(bool(torch.isfinite(tensor).all()) for tensor in value.values()):
        task = copy.copy(task)
        task.loss_scale /= 2
        value = task.gradient(params, weights, batch)
    return value
