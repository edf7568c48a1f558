"""Reads a run for a task: states and batches forward and backward, each step checked against what was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from leaveout import batches
from leaveout.batches import Batch
from leaveout.errors import MismatchError
from leaveout.recorder import constants_fingerprint
from leaveout.store import Record, Run
from leaveout.task import Task
from leaveout.vectors import PARAM, State, norm

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""How far a recomputed step may lie from the recorded one, relative to its length; rounding stays far below."""

CHECK_EVERY = 16


@dataclass(frozen=True)
class Moment:
    """One recorded step with everything that it needs: its batch and the states around it."""

    record: Record
    before: State
    after: State
    batch: Batch


class Trajectory:
    """A run seen through the task that it was trained on.

    Raises:
        MismatchError: if the task's model or data are not those of the run, saying what differs.
    """

    def __init__(self, run: Run, task: Task) -> None:
        self.run = run
        self.task = task
        self.rule = run.rule
        _check_model(run, task)
        _check_size(run, task)

    def __len__(self) -> int:
        return len(self.run)

    def initial(self) -> State:
        """The state before the first step."""
        return self._place(self.run.state(0))

    def final(self) -> State:
        """The state after the last step."""
        return self._place(self.run.final())

    def forward(self) -> Iterator[Moment]:
        """The steps from the first to the last."""
        after = self.initial()
        for index in range(len(self)):
            before, after = after, self._place(self.run.state(index + 1))
            yield self._moment(index, before, after)

    def backward(self) -> Iterator[Moment]:
        """The steps from the last to the first."""
        before = self.final()
        for index in reversed(range(len(self))):
            before, after = self._place(self.run.state(index)), before
            yield self._moment(index, before, after)

    def moment(self, index: int) -> Moment:
        """One step."""
        return self._moment(index, self._place(self.run.state(index)), self._place(self.run.state(index + 1)))

    def due(self, moment: Moment) -> bool:
        """Whether this is one of the steps that are computed again even where that costs a gradient of its own."""
        return moment.record.index % CHECK_EVERY == 0 or moment.record.index == len(self) - 1

    def _place(self, state: State) -> State:
        device = self.task.device
        return {slot: {name: tensor.to(device) for name, tensor in params.items()} for slot, params in state.items()}

    def _moment(self, index: int, before: State, after: State) -> Moment:
        record = self.run.record(index)
        ids = record.ids.tolist()
        if max(ids) >= self.task.size:
            raise MismatchError(
                f"Step {index} used example {max(ids)}, but the training set has only {self.task.size}: give the data "
                "set that was trained on."
            )
        batch = self.task.read(ids)
        if record.fingerprint:
            found = batches.difference(record.fingerprint, batch, lambda: self.task.read(ids))
            if found:
                raise MismatchError(f"The batch of step {index} is not the one that was trained on: {found}.")
        return Moment(record, before, after, batch)


def check_step(moment: Moment, predicted: State, travelled: float | None = None) -> None:
    """Refuses a step that does not follow from its batch and the task.

    ``‖predicted − recorded‖ ≤ tolerance · length of the step`` (or of the way travelled, for a model that replays the
    run on its own), plus what rounding can do.
    """
    before, after = moment.before[PARAM], moment.after[PARAM]
    missed = norm({name: predicted[PARAM][name] - after[name] for name in after})
    dtype = next(iter(after.values())).dtype
    length = norm({name: after[name] - before[name] for name in after}) if travelled is None else travelled
    allowed = TOLERANCE.get(dtype, 1e-2) * length + 64 * torch.finfo(dtype).eps * norm(after)
    if missed <= allowed:
        return
    where = f"Step {moment.record.index}"
    if missed != missed:
        raise MismatchError(
            f"{where} gives NaN when it is computed again: look at the losses of its batch's examples "
            f"{moment.record.ids.tolist()[:8]}."
        )
    raise MismatchError(
        f"{where} does not follow from its batch and this task: computed again it ends "
        f"{missed / max(length, 1e-300):.2g} step lengths away from the recorded state; give the Task the loss, l2 and "
        "model that were trained, and train without gradient clipping, accumulation, mixed precision or randomness."
    )


def _check_model(run: Run, task: Task) -> None:
    manifest, params = run.manifest, task.parameters()
    shapes = {name: list(param.shape) for name, param in params.items()}
    if set(shapes) != set(manifest.shapes):
        name = sorted(set(shapes) ^ set(manifest.shapes))[0]
        where = "the task's model but not in the run" if name in shapes else "the run but not in the task's model"
        raise MismatchError(f"Parameter {name!r} is trained in {where}: give the model that was recorded.")
    for name, shape in shapes.items():
        if shape != manifest.shapes[name]:
            raise MismatchError(
                f"Parameter {name!r} has shape {shape} in the task's model and {manifest.shapes[name]} "
                "in the run: give the model that was recorded."
            )
        dtype = str(params[name].dtype).removeprefix("torch.")
        if dtype != manifest.dtypes[name]:
            raise MismatchError(
                f"Parameter {name!r} is {dtype} in the task's model and {manifest.dtypes[name]} in the "
                "run: convert the model to the run's type."
            )
    if constants_fingerprint(task.model, run.rule) != manifest.constants:
        raise MismatchError(
            "Frozen parameters or buffers of the task's model differ from those that were recorded: "
            "give the model that was recorded, with the same frozen values."
        )


def _check_size(run: Run, task: Task) -> None:
    if run.manifest.train_size not in (None, task.size):
        raise MismatchError(
            f"The run was trained on {run.manifest.train_size} examples and the task's training set "
            f"has {task.size}: give the data set that was trained on."
        )
