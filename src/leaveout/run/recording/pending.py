"""The batches drawn since the last optimizer step: the micro-batches of the next step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leaveout._util.generators import RandomState
from leaveout._util.trees import Params
from leaveout.errors import LeaveoutError
from leaveout.run.micro import Micro
from leaveout.run.recording import failures
from leaveout.run.recording.first_pass import FirstPass
from leaveout.run.recording.forwards import Forwards, Pass, random_of
from leaveout.run.recording.moving_buffers import MovingBuffers
from leaveout.run.recording.noting import Noting
from leaveout.run.recording.results import Results
from leaveout.run.seen import ASIDE, BY_LOOP, COMPILED, DEPENDS, PASSES
from leaveout.task import batches


class DrawnBatch(NamedTuple):
    """A drawn batch, the values to fingerprint of it, and the states of the random generators when it was drawn."""

    ids: Tensor
    batch: Any
    unhashed: list[Any]
    random: RandomState | None = None
    denominator: float | None = None
    autocast: str | None = None
    watched: bool = False


class StepInputs(NamedTuple):
    """What a step was computed from: its micro-batches, modes, the random generators after it, and batches to keep.

    ``unhashed`` holds the values that the writer thread has yet to fingerprint.
    """

    ids: Tensor
    fingerprint: list[tuple[int, int]]
    micro: tuple[Micro, ...]
    training: tuple[str, ...]
    after: RandomState | None
    batches: tuple[Any, ...]
    autocast: str | None
    unhashed: list[Any]


class Pending:
    """The batches since the last step, each with the forward passes that used it.

    Args:
        model: the model that is trained.
        moving: the model's moving buffers.
        note: writes down what is seen of the loop.
        unused: called when a batch is drawn while the one before it, which was used, had no step yet.
        fresh: whether a new run begins, in which case its first forward pass is checked.
    """

    def __init__(
        self,
        model: nn.Module,
        moving: MovingBuffers,
        note: Callable[[str, str], None],
        unused: Callable[[], None],
        *,
        fresh: bool = True,
    ) -> None:
        self._unused = unused
        self._batches: list[DrawnBatch] = []
        self._left = False
        self._moving = moving
        self._noting = Noting()
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._note = note
        if hasattr(model, "_orig_mod"):
            note(COMPILED, "yes")
        self._first_pass = FirstPass(model if fresh else None, note)
        self._start: Params = {}
        self.from_loader = False
        self._results = Results(model)
        self._proof: Callable[[], LeaveoutError | None] = lambda: None
        self._forwards = Forwards(model, lambda: len(self._batches), moving.begin, self._forget_dropped)

    def __bool__(self) -> bool:
        return bool(self._batches)

    @property
    def untouched(self) -> bool:
        """Say whether the forward passes of the next step are all still to come, in a closure that has one batch."""
        return not self._forwards.passes and len(self._batches) == 1

    @property
    def autocast(self) -> str | None:
        """The dtype that ``torch.autocast`` used in the last forward pass."""
        last = self._forwards.passes or self._batches
        return last[-1].autocast if last else None

    def _forget_dropped(self) -> None:
        """Forget batches whose gradients were discarded, as after a step that a gradient scaler skipped.

        This shows when the next batch is drawn or, if the loop calls ``zero_grad`` after that, at its forward pass.
        """
        newest_is_unused = len(self._batches) > 1 and self._forwards.passes[-1].place < len(self._batches)
        if newest_is_unused and self._without_gradients():
            newest = self._batches.pop()
            self._drop()
            self._batches.append(newest)

    def watch(self, ids: Tensor, batch: Any) -> None:
        """Add a batch that a loader is about to yield."""
        if self._left:
            self.clear()
        if not self._batches:  # passes before a batch are not its own
            self._forwards.clear()
            self._first_pass.forget()
        used = self._batches and any(self._forwards.of_batches(len(self._batches)))
        if used:
            self._unused()
            if self._without_gradients():
                self._drop()
        self._first_pass.arrive()
        self._batches.append(DrawnBatch(ids, batch, self._noting(batch), self._forwards.state(), watched=True))

    def _drop(self) -> None:
        """Forget the batches, or what their losses gave if their passes moved buffers, which stay moved."""
        if self._moving.passed:
            self._batches = [batch._replace(denominator=math.inf) for batch in self._batches]
        else:
            self.clear()

    def add(
        self, ids: Tensor, batch: Any, denominator: float | None, autocast: str | None = None
    ) -> Callable[[], None]:
        """Add a batch that the loop names, before or after its forward pass; return a function that removes it."""
        if not self._batches:
            self._first_pass.expect()
        unhashed = [] if batch is None else self._noting(batch)
        drawn = DrawnBatch(ids, batch, unhashed, self._forwards.state(), denominator, autocast)
        self._batches.append(drawn)
        return lambda: self._remove(drawn)

    def _remove(self, batch: DrawnBatch) -> None:
        """Forget a batch that has no gradient, with the forward passes since it was named."""
        if self._batches and self._batches[-1] is batch:
            self._moving.check_skipped()
            self._forwards.passes = [one for one in self._forwards.passes if one.place < len(self._batches)]
            self._batches.pop()

    def take(self, *, keep_batches: bool = False) -> StepInputs:
        """Return what the step just taken was computed from, and start over.

        Batches that no forward pass has used were skipped by the loop, and are left out.
        """
        passes = self._forwards.of_batches(len(self._batches))
        if any(passes) and not all(passes):
            self._batches = [batch for batch, own in zip(self._batches, passes, strict=True) if own]
            passes = [own for own in passes if own]
        drawn = self._batches
        micro = tuple(
            Micro(len(batch.ids), random_of(own) if own else self._random_if_changed(batch), batch.denominator)
            for batch, own in zip(drawn, passes, strict=True)
        )
        if self._first_pass.waits:
            self._prove_later(drawn[0], passes[0])
        if len(self._forwards.passes) > len(drawn):
            self._note(PASSES, str(-(-len(self._forwards.passes) // len(drawn))))
        last = self._forwards.passes[-1] if self._forwards.passes else None
        inputs = StepInputs(
            ids=torch.cat([batch.ids for batch in drawn]) if len(drawn) > 1 else drawn[0].ids,
            fingerprint=[],
            micro=micro,
            training=self._forwards.training() if last is None else last.training,
            after=self._forwards.state() if any(part.random for part in micro) else None,
            batches=tuple(map(self._kept, drawn)) if keep_batches else (),
            autocast=self.autocast,
            unhashed=[leaf for batch in drawn for leaf in batch.unhashed],
        )
        self.clear()
        return inputs

    def _kept(self, drawn: DrawnBatch) -> Any:
        """Return a batch to keep, and note what shows that it depends on the parameters."""
        if drawn.batch is None:
            raise failures.batch_not_given()
        if not drawn.watched and not self.from_loader:
            self._note(BY_LOOP, "yes")
            if sign := self._results.sign(drawn.batch):
                self._note(DEPENDS, sign)
            if self._forwards.aside:
                self._note(ASIDE, "yes")
        return batches.map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, drawn.batch)

    def _prove_later(self, drawn: DrawnBatch, passes: Sequence[Pass]) -> None:
        """Have the first step's first pass proven once the step is recorded."""
        self._first_pass.release()
        first, state, start = (passes[0] if passes else None), drawn.random if drawn.watched else None, self._start
        self._proof = lambda: self._first_pass.problem(first, drawn.ids, drawn.batch, state, start)

    def begin(self, start: Params) -> None:
        """Note the parameters and moving buffers before the first step."""
        self._start = start

    def problem(self) -> LeaveoutError | None:
        """Return what keeps the first step, just taken, from being scored, as far as that shows without its loss."""
        proof, self._proof, self._start = self._proof, lambda: None, {}
        return proof()

    def broken(self) -> tuple[list[int], list[int]]:
        """Return all ids, and those of the examples that hold NaN or infinite values."""
        ids, bad = [], []
        for drawn in self._batches:
            ids += drawn.ids.tolist()
            rows = [] if drawn.batch is None else batches.broken(drawn.batch)
            bad += [int(drawn.ids[row]) for row in rows if row < len(drawn.ids)]
        return ids, bad

    def leave(self) -> None:
        """Note that the loop left a loader early: its batches have their step before another is drawn, or none."""
        self._left = True

    def clear(self) -> None:
        """Forget the batches: the step was taken, or there will be none."""
        self._batches, self._left = [], False
        self._first_pass.forget()
        self._results.turn()
        self._forwards.clear()

    def skip_check(self) -> None:
        """Skip the check of the first forward pass."""
        self._first_pass.release()

    def release(self) -> None:
        """Remove all hooks from the model."""
        self._forwards.release()
        self._results.release()
        self._first_pass.release()

    def _without_gradients(self) -> bool:
        return all(param.grad is None for param in self._params)

    def _random_if_changed(self, batch: DrawnBatch) -> RandomState | None:
        """Return the generators' states when a batch was drawn, for models not called as a whole; None if unchanged."""
        now, before = self._forwards.state(), batch.random
        if not before or all(torch.equal(before[name], now[name]) for name in now):
            return None
        return before
