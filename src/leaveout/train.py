"""Training with the examples weighted: the built-in recorded loop, and the same run again with some left out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from leaveout.batches import Batch
from leaveout.errors import InputError, LeaveoutWarning, MismatchError, RunError, check_seed, is_whole
from leaveout.members import Members
from leaveout.moment import Moment
from leaveout.optim import Hyper
from leaveout.products import stacked_gradients
from leaveout.recorder import Recorder
from leaveout.resources import Cost, Resources
from leaveout.store import Run
from leaveout.task import Task, looped
from leaveout.trajectory import Trajectory
from leaveout.vectors import PARAM, Params, State, distance

LARGE = 1_000_000
"""Bytes that a batch leaves for its backward pass, above which a stack of convolutions takes longer than a loop."""


def train(
    task: Task,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    batch_size: int,
    seed: int,
    out: str | Path,
    *,
    keep: str | int = "auto",
    resume: bool = False,
    resources: Resources | None = None,
) -> Run:
    """Trains the task's model with shuffled batches and records it.

    Args:
        task: model, loss and data; the model's parameters are trained in place.
        optimizer: a ``torch.optim`` optimizer over them.
        epochs: how often every example is seen.
        batch_size: examples a step; the last batch of an epoch may be smaller.
        seed: of the shuffling.
        out: a new directory for the run.
        keep: which states go to disk, as for ``Recorder``.
        resume: go on where a run in ``out`` was cut short, with the same batches; the run that is finished then is
            the one that would have been recorded undisturbed. A finished one is returned as it is.
        resources: whether to show progress.
    """
    if not is_whole(epochs, 1) or not is_whole(batch_size, 1):
        raise InputError(f"epochs={epochs} and batch_size={batch_size} must both be whole numbers of at least 1.")
    order = torch.Generator().manual_seed(check_seed(seed))
    plan = (
        (epoch, ids) for epoch in range(epochs) for ids in torch.randperm(task.size, generator=order).split(batch_size)
    )
    steps = epochs * -(-task.size // batch_size)
    with Recorder(out, task.model, optimizer, keep=keep, resume=resume) as recorder:
        if recorder.before is not None:
            _pass_over(recorder.before, plan, steps, recorder.hypers())
        for epoch, ids in (resources or Resources()).track(plan, steps - recorder.done, "training"):
            batch = task.read(ids.tolist())
            optimizer.zero_grad()
            losses = task.losses(task.parameters(), batch)
            if not bool(torch.isfinite(losses.detach()).all()):
                raise RunError(_not_finite(recorder.done, ids, losses.detach()))
            losses.mean().backward()
            recorder.step(ids, batch, epoch=epoch)
            optimizer.step()
        return recorder.finish()


def _not_finite(step: int, ids: Tensor, losses: Tensor) -> str:
    example = int(ids[int((~torch.isfinite(losses)).nonzero()[0, 0])])
    return (
        f"Step {step} has no finite loss, that of example {example} is NaN or infinite: look at it, or lower the "
        "learning rate; the steps before it are kept."
    )


def _pass_over(run: Run, plan: Iterator[tuple[int, Tensor]], steps: int, hypers: list[Hyper]) -> None:
    """Takes the batches that are done from the plan; refuses to go on in another way than the run was begun."""
    done = (run.record(index) for index in range(len(run)))
    same = len(run) == steps if run.manifest.finished else len(run) <= steps
    if not same or not all(torch.equal(record.ids, ids) for record, (_, ids) in zip(done, plan, strict=False)):
        raise MismatchError(
            f"The run in {run.path} was begun with other batches: give the epochs, batch_size, seed and training set "
            "that it was begun with, or another directory."
        )
    counted = ("started", "step")
    for now, then in zip(hypers, run.record(len(run) - 1).hypers, strict=True):
        if changed := [name for name in then if name not in counted and now[name] != then[name]]:
            raise MismatchError(
                f"The run in {run.path} was begun with {changed[0]}={then[changed[0]]:g}, not {now[changed[0]]:g}: "
                "give the optimizer that it was begun with, or another directory."
            )


def counterfactuals(
    trajectory: Trajectory, members: Members, weight: float, resources: Resources, cost: Cost
) -> Params:
    """Final parameters of the run again, once for each row with its examples weighted ``weight``, and once with none.

    The models are trained side by side; the last of the stack is the one with every example, whose way must be the
    recorded one.
    """
    params: Params = {}
    for _, params in courses(trajectory, members, weight, resources, cost):  # noqa: B007 - the last one counts
        pass
    return params


def courses(
    trajectory: Trajectory, members: Members, weight: float, resources: Resources, cost: Cost
) -> Iterator[tuple[Moment, Params]]:
    """The trainings of ``counterfactuals`` on their way: each step with all models' parameters after it.

    The tensors change in place with the next step.
    """
    count = len(members) + 1
    state = _copies(trajectory, count)
    gradients: Callable[..., Params] | None = None
    travelled, strayed = 0.0, False
    for moment in resources.track(trajectory.forward(), len(trajectory), f"replaying {len(members)}"):
        weights = _weights(members, moment.record.ids, weight, state[PARAM])
        if gradients is None:
            gradients = _way(trajectory.task, state[PARAM], moment.batch)
        state = trajectory.rule.step_(state, gradients(state[PARAM], weights, moment.batch), moment.record.hypers)
        cost.gradients += count
        travelled += distance(moment.after[PARAM], moment.before[PARAM])
        whole = {PARAM: {name: tensor[-1] for name, tensor in state[PARAM].items()}}
        share = trajectory.check.way(moment, whole, travelled)
        if share is not None and not strayed:
            strayed = True
            _warn_of_rounding(moment.record.index, share)
        yield moment, state[PARAM]


def _warn_of_rounding(step: int, share: float) -> None:
    warnings.warn(
        f"At step {step} the replay with every example has left the recorded run by {share:.1g} of the way travelled, "
        "by rounding alone: this training magnifies small differences. Replays are compared with that replay, not with "
        "the recorded run, but effects as small as this are noise; train in float64 or with a smaller learning rate "
        "to measure them.",
        LeaveoutWarning,
        stacklevel=2,
    )


def shuffled(trajectory: Trajectory, members: Members, seed: int, resources: Resources, cost: Cost) -> Params:
    """As ``counterfactuals`` with weight zero, but in a fresh order: each epoch the examples change places at random.

    Start, step sizes and batch sizes are the recorded ones; with all examples this is another run, not the recorded.
    """
    state, count = _copies(trajectory, len(members) + 1), len(members) + 1
    task, order = trajectory.task, torch.Generator().manual_seed(seed)
    gradients: Callable[..., Params] | None = None
    epoch, places = None, torch.arange(task.size)
    for index in resources.track(range(len(trajectory)), len(trajectory), f"training {count}"):
        record = trajectory.run.record(index)
        if record.epoch != epoch:
            epoch, places = record.epoch, torch.randperm(task.size, generator=order)
        ids = places[record.ids]
        batch = task.read(ids.tolist())
        weights = _weights(members, ids, 0.0, state[PARAM])
        if gradients is None:
            gradients = _way(task, state[PARAM], batch)
        state = trajectory.rule.step_(state, gradients(state[PARAM], weights, batch), record.hypers)
        cost.gradients += count
    return state[PARAM]


def _copies(trajectory: Trajectory, count: int) -> State:
    return {
        slot: {name: tensor.expand(count, *tensor.shape).clone() for name, tensor in params.items()}
        for slot, params in trajectory.initial().items()
    }


def _weights(members: Members, ids: Tensor, weight: float, params: Params) -> Tensor:
    like = next(iter(params.values()))
    weights = like.new_ones((len(like), len(ids)))
    row, position = members.pairs(ids)
    weights[row, position] = weight
    return weights


def _way(task: Task, params: Params, batch: Batch) -> Callable[..., Params]:
    """How many models' gradients are taken: all at once, or one after the other.

    The first is quicker but for convolutions of some size, whose weights cannot be joined into one product. The choice
    depends on nothing but the task, so that the same replay has the same rounding wherever and whenever it is done.
    """
    convolutions = any(isinstance(module, nn.modules.conv._ConvNd) for module in task.model.modules())
    alone = {name: tensor[0] for name, tensor in params.items()}
    if not task.abilities.vmap or (convolutions and task.footprint(alone, batch) > LARGE):
        return looped(task.gradient, (0, 0, None))
    return partial(stacked_gradients, task)
