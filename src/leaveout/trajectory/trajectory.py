"""Reads a run for a task: states and batches forward and backward, each step checked against what was recorded."""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain, islice, pairwise
from random import Random
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from leaveout._util.trees import PARAM, Params, State, distance, each, nbytes
from leaveout.diff.operator import gradient
from leaveout.errors import MismatchError, UnsupportedError
from leaveout.optim import AVERAGE
from leaveout.optim.rule import SHARE
from leaveout.run.gradient_states import CACHE
from leaveout.run.model_match import check_model
from leaveout.run.reader import Run
from leaveout.run.record import Record
from leaveout.task import batches
from leaveout.task.batches import Batch
from leaveout.task.checks import refuse
from leaveout.task.footprint import activation_bytes
from leaveout.task.guard.comparison import Comparison
from leaveout.task.guard.coupled import carried
from leaveout.task.guard.points import mixing
from leaveout.task.objective import Objective
from leaveout.task.preparing import MicroBatch, prepared, trial_batch, trial_ids
from leaveout.task.task import Task
from leaveout.trajectory.modes import Modes
from leaveout.trajectory.recorded_step import RecordedStep
from leaveout.trajectory.step_check import StepCheck

FEWEST = 8
"""States that are held going backward even if they are large: the fewer, the more often steps are repeated."""

DRAWN, LONGEST = 3, 64
"""How many steps are drawn at random to be checked, and how many in a row are computed for that."""


DRAWN = 8
"""The most steps from which examples are drawn to compare derivatives on."""

BLOCK = 64
"""How many queries are looked at together."""


class Trajectory:
    """A run together with the task it was trained on; with ``layers``, for some of its parameters.

    ``objective``, ``rule`` and the returned states are then those of the chosen parameters alone. ``trained`` is the
    objective with the rounding of mixed precision, for values; ``objective`` is without it, for derivatives. Both are
    as the first step saw them.

    Raises:
        MismatchError: if the task's model or data are not those of the run, saying what differs.
    """

    def __init__(self, run: Run, task: Task, layers: str | Sequence[str] | None = None) -> None:
        if run.manifest.uneven:  # some may be frozen by now
            task = task.of(task.objective.training_only(run.rule.groups))
        check_model(run.manifest, task.model, task.parameters())
        _check_size(run, task)
        self.run = run
        self._modes = Modes(run, task, layers)
        clip, penalty, buffers = task.objective.clip, task.objective.penalty, tuple(run.manifest.buffers)
        self._rule = run.rule.averaging(on=run.averaged).extended(clip, buffers, penalty)
        self._anchors = run.kept if run.kept[-1] == len(run) else [*run.kept, len(run)]  # states that others start from
        _, self.trained, self.objective = self._modes.first
        self.task = task.of(self.objective)
        self.rule = self._rule.restricted(self.objective.chosen)
        if layers is not None and clip is not None and clip.norm is not None:
            raise UnsupportedError(
                "layers= looks at some parameters alone, and clip_norm= ties them to all others: leave layers out.",
                code="layers-with-clipping",
            )
        self.check = StepCheck(self.rule)

    def __len__(self) -> int:
        return len(self.run)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the last state when pickling: other processes read it themselves."""
        return {name: value for name, value in self.__dict__.items() if name != "_final"}

    def compared(self, queries: Dataset | None = None) -> Trajectory:
        """Return the same after comparing its derivatives at the run's last state, as was done at the task's own.

        If the model may run other code for other examples, they are also compared wherever it does, on ``queries`` too.
        """
        question = self.run.fingerprint, self.final_whole()[PARAM], self._drawn()
        modes = self._modes.compared_at(question)
        first = modes.comparison(self.run.record(0))
        if first is not None and first.open:
            self._look_everywhere(modes, first, queries)
            modes = self._modes.compared_at(question)
        if len(self.run.manifest.modes) <= 1 and modes.first.objective.abilities == self.objective.abilities:
            return self
        other = copy.copy(self)
        other._modes, other._final = modes, self._final
        _, other.trained, other.objective = modes.first
        other.task = self.task.of(other.objective)
        return other

    def _drawn(self) -> list[int]:
        """Draw examples from random steps, on which derivatives are compared."""
        draw = Random(0)  # noqa: S311 - no secret
        steps = draw.choices(range(len(self)), k=DRAWN)
        if carried(self.objective):  # a state may have a row for each example of a batch
            record = self.run.record(steps[0])
            return [int(number) for number in record.ids[: record.parts[0].length]]
        drawn = {draw.choice(self.run.record(step).ids.tolist()) for step in steps}
        known = sorted(number for number in drawn if number < self.task.size)
        return trial_ids(self.objective, known or range(self.task.size))

    def _look_everywhere(self, modes: Modes, first: Comparison, queries: Dataset | None) -> None:
        """Compare derivatives in the steps, and for the queries, in which the model runs other code."""
        for step in self.forward():
            comparison = modes.comparison(step.record)
            if comparison is not None:
                comparison.add(step.params, step.batch, f"in step {step.record.index}")
        params = self.scored(self.final_whole())
        size = 0 if queries is None else batches.size(queries)
        for start in range(0, size, BLOCK):
            block = self.task.read(range(start, min(start + BLOCK, size)), queries)
            first.add(params, block, "for the queries")

    def check_examples(self) -> None:
        """Refuse examples that depend on each other at the run's last state, as a few forward passes show."""
        params = self.final_whole()[PARAM]
        if not self.task.check or self.objective.coupled:
            return
        batch = trial_batch(self.objective, params, self.task.read(self._drawn()))
        problem = None if batch.whole else mixing(self.objective, params, batch)
        if problem:
            refuse([f"at the run's last state, {problem}"])

    def check_steps(self) -> None:
        """Check the first steps, the last ones and some at random, for methods that do not go through all of them.

        A step between states that are not kept is checked with the others there, if these are not too many.
        """
        drawn = torch.randint(len(self._anchors) - 1, (DRAWN,), generator=torch.Generator().manual_seed(0)).tolist()
        for place in sorted({0, len(self._anchors) - 2, *drawn}):
            start, stop = self._anchors[place], self._anchors[place + 1]
            if stop == start + 1:
                recorded = self.recorded_step(start)
                self.check.step(recorded, self.check.recomputed(recorded, recorded.params))
            elif stop - start <= LONGEST and not self.run.interpolate:
                for _ in self._between(self._state(start), self._state(stop), start, stop):
                    pass  # compares where they lead

    def initial(self) -> State:
        """Return the state before the first step."""
        return self._chosen(self._state(0))

    def final(self) -> State:
        """Return the state after the last step."""
        return self._chosen(self.final_whole())

    def final_whole(self) -> State:
        """Return the state of all parameters after the last step; it is read only once, so do not write to it."""
        return self._final

    @cached_property
    def _final(self) -> State:
        return self._state(len(self))

    @cached_property
    def activations(self) -> int:
        """Bytes that the first batch's forward pass keeps for its backward pass."""
        return activation_bytes(self.objective, self.final_whole()[PARAM], self.batch(0))

    @property
    def slot(self) -> str:
        """The slot of the state at which queries are evaluated: the parameters, or their average."""
        return AVERAGE if self.run.averaged else PARAM

    def scored(self, state: State) -> Params:
        """Return the parameters of a state, or of a stack, at which queries are evaluated; counts are not averaged."""
        return {**state[PARAM], **state[self.slot]}

    def forward(self) -> Iterator[RecordedStep]:
        """Yield the steps from the first to the last."""
        self.objective.execution.tracer.expect(len(self))
        before = self._state(0)
        for start, stop in pairwise(self._anchors):
            states = self._between(before, self._state(stop), start, stop)
            for index, after in zip(range(start, stop), states, strict=True):
                yield self._recorded_step(index, before, after)
                before = after

    def backward(self, before: int | None = None) -> Iterator[RecordedStep]:
        """Yield the steps from the last to the first, or those before one.

        Of the states between two kept ones, only some are held at a time if they are large.
        """
        self.objective.execution.tracer.expect(len(self))
        kept = self._anchors
        first = len(self) if before is None else before
        places = range(bisect_left(kept, first))
        after = self._state(kept[len(places)])
        for place in reversed(places):
            start, stop = kept[place], kept[place + 1]
            state = self._state(start)
            for index, before_step in self._descending(state, after, start, stop):
                if index < first:
                    yield self._recorded_step(index, before_step, after)
                after = before_step

    def recorded_step(self, index: int) -> RecordedStep:
        """Return one step."""
        place = bisect_right(self._anchors, index)
        start, stop = self._anchors[place - 1], self._anchors[place]
        first = self._state(start)
        states = chain([first], self._between(first, self._state(stop), start, stop))
        before, after = islice(states, index - start, index - start + 2)
        return self._recorded_step(index, before, after)

    def _between(self, first: State, last: State, start: int, stop: int) -> Iterator[State]:
        """Yield the states after steps start, ..., stop − 1: recomputed or interpolated up to the last, kept one."""
        if self.run.interpolate:
            for index in range(start + 1, stop):
                yield _mixed(first, last, (index - start) / (stop - start))
        elif stop > start + 1:
            yield from self._replayed(first, last, start, stop)
        yield last

    def _descending(self, first: State, last: State, start: int, stop: int) -> Iterator[tuple[int, State]]:
        """Yield the steps from stop − 1 to start, each with the state before it; only some of the states are held.

        Those between two that are held are computed once more when their turn comes.
        """
        most = max(FEWEST, CACHE // nbytes(first))
        gap = -(-(stop - start) // most)
        states = enumerate(self._between(first, last, start, stop), start + 1)
        held = [first, *(state for index, state in states if index < stop and (index - start) % gap == 0)]
        for index in reversed(range(start, stop, gap)):
            state = held.pop()
            if gap == 1:
                yield index, state
            else:
                yield from self._descending(state, last, index, min(index + gap, stop))
            last = state

    def _replayed(self, first: State, last: State, start: int, stop: int) -> Iterator[State]:
        """Yield the states between two kept ones by taking the recorded steps, which must lead to the second."""
        state, travelled = first, 0.0
        for index in range(start, stop):
            record = self.record(index)
            batch = self._batch(record, state[PARAM])
            seen = self._modes.of(record)
            after = self._rule.step(state, gradient(seen.whole, state[PARAM], batch), record.hypers)
            travelled += distance(after[PARAM], state[PARAM])
            if index < stop - 1:
                yield after
            else:
                recorded = RecordedStep(
                    record, state, last, batch, state[PARAM], seen.objective, seen.whole, self.run.as_recorded
                )
                StepCheck(self._rule).arrival(recorded, after, travelled)
            state = after

    def _state(self, index: int) -> State:
        """Return a kept state or the last one, on the task's device."""
        is_kept = index != len(self) or index == self.run.kept[-1]
        state = self.run.state(index) if is_kept else self._end()
        # Not a view of its shard: forward mode allocates zeros as large as the memory that a tensor is a view of.
        return {slot: each(lambda t: t.to(self.task.device), state[slot]) for slot in self._rule.slots}

    def _end(self) -> State:
        """Return the last state of a run that ends between two kept ones, by a replay that must reach the second."""
        if self.run.end is None:
            start = self.run.kept[-1]
            stop = self.run.on_disk[len(self.run.kept)]
            states = list(self._replayed(self._state(start), self._state(stop), start, stop))
            self.run.end = states[len(self) - start - 1]
        return {slot: each(torch.clone, params) for slot, params in self.run.end.items()}

    def record(self, index: int) -> Record:
        """Return what was recorded of a step, and how much of the penalty a window of another length got."""
        record, whole = self.run.record(index), self.trained.accumulation
        if self.trained.penalty is None or not isinstance(whole, int) or len(record.parts) == whole:
            return record
        return replace(record, hypers=[{**hyper, SHARE: len(record.parts) / whole} for hyper in record.hypers])

    def batch(self, index: int) -> Batch:
        """Return the batch of a step, checked against what was recorded of it."""
        return self._batch(self.run.record(index), self._state(0)[PARAM])

    def shuffled(self, record: Record, ids: Int[Tensor, " batch"], params: Params) -> Batch:
        """Return a batch of other examples in the places of a step's own, with its random draws and denominators."""
        starts = [0, *accumulate(part.length for part in record.parts)]
        micro_batches = [self.task.read(ids[start:stop].tolist()) for start, stop in pairwise(starts)]
        return self._prepared(record, micro_batches, params)

    def _prepared(self, record: Record, micro_batches: Sequence[Batch], params: Params) -> Batch:
        pairs = zip(micro_batches, record.parts, strict=True)
        parts = [MicroBatch(batch, part.random, part.denominator) for batch, part in pairs]
        return prepared(self._modes.of(record).whole, parts, params)

    def _batch(self, record: Record, params: Params) -> Batch:
        """Return a step's micro-batches as training saw them; ``params`` are any that the model can be called with."""
        kept = self.run.batches(record.index)
        if kept:
            return self._prepared(record, [batches.to(batch, self.task.device) for batch in kept], params)
        starts = [0, *accumulate(part.length for part in record.parts)]
        leaves = len(record.fingerprint) // len(record.parts)
        micro_batches = []
        for i, (start, stop) in enumerate(pairwise(starts)):
            fingerprint = record.fingerprint[i * leaves : (i + 1) * leaves]
            micro_batches.append(self._read(record.index, record.ids[start:stop].tolist(), fingerprint))
        return self._prepared(record, micro_batches, params)

    def _read(self, index: int, ids: list[int], fingerprint: list[tuple[int, int]]) -> Batch:
        if max(ids) >= self.task.size:
            raise MismatchError(
                f"Step {index} used example {max(ids)}, but the training set has only {self.task.size}: give the data "
                "set that was trained on.",
                code="train-size-differs",
            )
        batch = self.task.read(ids)
        rows = {len(leaf) for leaf in batches.leaves(batch)}
        if rows != {len(ids)}:
            raise MismatchError(
                f"The batch of step {index} has {len(ids)} examples, but {sorted(rows)} rows: give a collate function "
                "that returns a row for each example.",
                code="rows-differ",
            )
        if fingerprint:
            difference = batches.difference(fingerprint, batch, lambda: self.task.read(ids))
            if difference:
                raise MismatchError(
                    f"The batch of step {index} is not the one that was trained on: {difference}.", code="batch-differs"
                )
        return batch

    def _recorded_step(self, index: int, before: State, after: State) -> RecordedStep:
        record = self.record(index)
        seen = self._modes.of(record)
        batch = self._batch(record, before[PARAM])
        states = (self._chosen(before), self._chosen(after))
        loop = self.run.manifest.seen
        return RecordedStep(record, *states, batch, before[PARAM], seen.objective, seen.trained, self.run.exact, loop)

    def trained_at(self, record: Record) -> Objective:
        """Return the objective in the modes of a step, with the rounding of mixed precision."""
        return self._modes.of(record).trained

    def _chosen(self, state: State) -> State:
        """Return the parameters and buffers of a state that the objective has derivatives in."""
        names = self.objective.variables(state[PARAM])
        return {slot: {name: params[name] for name in names if name in params} for slot, params in state.items()}


def _mixed(first: State, last: State, share: float) -> State:
    return {slot: each(lambda a, b: torch.lerp(a, b, share), first[slot], last[slot]) for slot in first}


def _check_size(run: Run, task: Task) -> None:
    if run.manifest.train_size not in (None, task.size):
        raise MismatchError(
            f"The run was trained on {run.manifest.train_size} examples and the task's training set "
            f"has {task.size}: give the data set that was trained on.",
            code="train-size-differs",
        )
