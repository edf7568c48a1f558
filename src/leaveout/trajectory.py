"""Reads a run for a task: states and batches forward and backward, each step checked against what was recorded."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout import batches
from leaveout.batches import Batch
from leaveout.errors import MismatchError
from leaveout.matching import check_model
from leaveout.optim import Rule
from leaveout.products import gradient
from leaveout.store import Record, Run
from leaveout.task import Task
from leaveout.vectors import PARAM, Params, State, each, norm

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""How far a recomputed step may lie from the recorded one, relative to its length; rounding stays far below."""


@dataclass(frozen=True)
class Moment:
    """One recorded step with everything that it needs: its batch and the states around it.

    ``params`` are all parameters before the step, also where the states hold chosen ones only. ``exact`` is false
    where the states are interpolated, and the one does not lead to the other.
    """

    record: Record
    before: State
    after: State
    batch: Batch
    params: Params
    exact: bool = True


class Trajectory:
    """A run seen through the task that it was trained on; with ``layers``, through some of its parameters.

    ``task`` and ``rule``, and the states that are given out, are then those of the chosen parameters alone.

    Raises:
        MismatchError: if the task's model or data are not those of the run, saying what differs.
    """

    def __init__(self, run: Run, task: Task, layers: str | Sequence[str] | None = None) -> None:
        check_model(run.manifest, task.model, task.parameters())
        _check_size(run, task)
        self.run, self._whole = run, task
        self.task = task.restricted(layers)
        self.rule = run.rule.restricted(self.task.chosen)

    def __len__(self) -> int:
        return len(self.run)

    def initial(self) -> State:
        """The state before the first step."""
        return self._own(self._place(self.run.state(0)))

    def final(self) -> State:
        """The state after the last step."""
        return self._own(self.final_whole())

    def final_whole(self) -> State:
        """The state after the last step, of all parameters."""
        return self._place(self.run.final())

    def forward(self) -> Iterator[Moment]:
        """The steps from the first to the last."""
        for start, stop in pairwise(self.run.kept):
            states = self._between(start, stop)
            before = next(states)
            for index, after in zip(range(start, stop), states, strict=True):
                yield self._moment(index, before, after)
                before = after

    def backward(self, before: int | None = None) -> Iterator[Moment]:
        """The steps from the last to the first, or those before one; the states between two kept ones are together."""
        kept = self.run.kept
        first = len(self) if before is None else before
        for place in reversed(range(bisect_left(kept, first))):
            states = list(self._between(kept[place], kept[place + 1]))
            for index in reversed(range(kept[place], kept[place + 1])):
                after = states.pop()
                if index < first:
                    yield self._moment(index, states[-1], after)

    def moment(self, index: int) -> Moment:
        """One step."""
        place = bisect_right(self.run.kept, index)
        start, stop = self.run.kept[place - 1], self.run.kept[place]
        before, after = islice(self._between(start, stop), index - start, index - start + 2)
        return self._moment(index, before, after)

    def _between(self, start: int, stop: int) -> Iterator[State]:
        """The states before steps start, ..., stop: the kept two and, computed again or interpolated, the others."""
        first, last = self._place(self.run.state(start)), self._place(self.run.state(stop))
        yield first
        if self.run.interpolate:
            for index in range(start + 1, stop):
                yield _mixed(first, last, (index - start) / (stop - start))
        elif stop > start + 1:
            yield from self._replayed(first, last, start, stop)
        yield last

    def _replayed(self, first: State, last: State, start: int, stop: int) -> Iterator[State]:
        """The states between two kept ones, by taking the recorded steps; they must lead to the second."""
        state, travelled = first, 0.0
        for index in range(start, stop):
            record, batch = self.run.record(index), self.batch(index)
            after = self.run.rule.step(state, gradient(self._whole, state[PARAM], batch), record.hypers)
            travelled += norm({name: after[PARAM][name] - state[PARAM][name] for name in after[PARAM]})
            if index < stop - 1:
                yield after
            else:
                check_step(Moment(record, state, last, batch, state[PARAM], self.run.exact), after, travelled)
            state = after

    def _place(self, state: State) -> State:
        # Copied out of their shard: forward mode makes zeros as large as the memory that a tensor is a view of.
        return {slot: each(lambda t: t.to(self.task.device, copy=True), params) for slot, params in state.items()}

    def batch(self, index: int) -> Batch:
        """The batch of a step, checked against what was recorded of it."""
        record = self.run.record(index)
        ids = record.ids.tolist()
        if max(ids) >= self.task.size:
            raise MismatchError(
                f"Step {index} used example {max(ids)}, but the training set has only {self.task.size}: give the data "
                "set that was trained on."
            )
        batch = self.task.read(ids)
        rows = {len(leaf) for leaf in batches.leaves(batch)}
        if rows != {len(ids)}:
            raise MismatchError(
                f"The batch of step {index} has {len(ids)} examples, but {sorted(rows)} rows: give a collate function "
                "that returns a row for each example."
            )
        if record.fingerprint:
            found = batches.difference(record.fingerprint, batch, lambda: self.task.read(ids))
            if found:
                raise MismatchError(f"The batch of step {index} is not the one that was trained on: {found}.")
        return batch

    def _moment(self, index: int, before: State, after: State) -> Moment:
        record, batch, exact = self.run.record(index), self.batch(index), self.run.exact
        return Moment(record, self._own(before), self._own(after), batch, before[PARAM], exact)

    def _own(self, state: State) -> State:
        return {slot: self.task.own(params) for slot, params in state.items()}


def _mixed(first: State, last: State, share: float) -> State:
    return {slot: each(lambda a, b: torch.lerp(a, b, share), first[slot], last[slot]) for slot in first}


def check_step(moment: Moment, predicted: State, travelled: float | None = None) -> None:
    """Refuses a step that does not follow from its batch and the task.

    ``‖predicted − recorded‖ ≤ tolerance · length of the step`` (or of the way travelled, for states that were computed
    one from the other), plus what rounding can do.
    """
    if (strayed := _strayed(moment, predicted, travelled)) is not None:
        raise MismatchError(_does_not_follow(moment, strayed))


def check_way(moment: Moment, rule: Rule, task: Task, predicted: State, travelled: float) -> float | None:
    """As ``check_step``, for a model that takes the run's steps on its own way.

    Rounding can grow on such a way until the model has left the recorded one. Then the step is taken once more, from
    the recorded state. If it follows, nothing is wrong but rounding, and how far that has led is given, as a share of
    the way travelled.
    """
    strayed = _strayed(moment, predicted, travelled)
    if strayed is None:
        return None
    again = gradient(task, moment.params, moment.batch)
    check_step(moment, rule.step(moment.before, again, moment.record.hypers))
    return strayed


def _strayed(moment: Moment, predicted: State, travelled: float | None) -> float | None:
    """How far the prediction is from the recorded state, in lengths; None where that is within the tolerance."""
    if not moment.exact:
        return None
    before, after = moment.before[PARAM], moment.after[PARAM]
    missed = norm({name: predicted[PARAM][name] - after[name] for name in after})
    dtype = next(iter(after.values())).dtype
    length = norm({name: after[name] - before[name] for name in after}) if travelled is None else travelled
    if missed <= TOLERANCE.get(dtype, 1e-2) * length + 64 * torch.finfo(dtype).eps * norm(after):
        return None
    if missed != missed:
        raise MismatchError(
            f"Step {moment.record.index} gives NaN when it is computed again: look at the losses of its batch's "
            f"examples {moment.record.ids.tolist()[:8]}."
        )
    return missed / max(length, 1e-300)


def check_projection(moment: Moment, vector: State, carried: State, slope: float) -> None:
    """Refuses a step of a linear rule that does not follow from its batch, seen along one vector, at no extra cost.

    ``⟨u, s'⟩ = ⟨Aᵀu, s⟩ + ⟨(∂O/∂g)ᵀu, ḡ⟩`` holds for every u; ``slope`` is the last term, computed again.
    """
    if not moment.exact:
        return
    before, after = _flat(moment.before), _flat(moment.after)
    u = _flat(vector)
    recorded = float(u @ after - _flat(carried) @ before)
    size, length = float(u.norm()), float((after - before).norm())
    dtype = next(iter(moment.after[PARAM].values())).dtype
    allowed = size * (TOLERANCE.get(dtype, 1e-2) * length + 64 * torch.finfo(dtype).eps * float(after.norm()))
    if abs(recorded - slope) > allowed or recorded != recorded:
        raise MismatchError(_does_not_follow(moment, abs(recorded - slope) / max(size * length, 1e-300)))


def _flat(state: State) -> Float[Tensor, " width"]:
    return torch.cat([tensor.flatten() for params in state.values() for tensor in params.values()]).double()


def _does_not_follow(moment: Moment, missed: float) -> str:
    return (
        f"Step {moment.record.index} does not follow from its batch and this task: computed again it ends {missed:.2g} "
        "step lengths away from the recorded state; give the Task the loss, l2 and model that were trained, and train "
        "without gradient clipping, accumulation, mixed precision or randomness."
    )


def _check_size(run: Run, task: Task) -> None:
    if run.manifest.train_size not in (None, task.size):
        raise MismatchError(
            f"The run was trained on {run.manifest.train_size} examples and the task's training set "
            f"has {task.size}: give the data set that was trained on."
        )
