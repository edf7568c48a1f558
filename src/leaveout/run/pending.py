"""The batches drawn since the last optimizer step: the micro-batches of the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leaveout.run.first_pass import FirstPass
from leaveout.run.forwards import Forwards, random_of
from leaveout.run.micro import Micro
from leaveout.run.moving_buffers import MovingBuffers
from leaveout.run.noting import Noting
from leaveout.task import batches
from leaveout.task.draws import RandomState


class Drawn(NamedTuple):
    """A drawn batch; ``noted`` are the values to fingerprint, ``random`` the random generator states at that time."""

    ids: Tensor
    batch: Any
    noted: list[Any]
    random: RandomState | None = None
    denominator: float | None = None
    autocast: str | None = None


class Taken(NamedTuple):
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
        fresh: whether a new run begins, in which case its first forward pass is checked.
    """

    def __init__(self, model: nn.Module, moving: MovingBuffers, *, fresh: bool = True) -> None:
        self._batches: list[Drawn] = []
        self._moving = moving
        self._noting = Noting()
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._first_pass = FirstPass(model if fresh else None)
        self._forwards = Forwards(model, lambda: len(self._batches), moving.begin, self._dropped)

    def __bool__(self) -> bool:
        return bool(self._batches)

    @property
    def passes(self) -> int:
        """How many forward passes there were since the last step."""
        return len(self._forwards.passes)

    @property
    def autocast(self) -> str | None:
        """The dtype that ``torch.autocast`` used in the last forward pass."""
        last = self._forwards.passes or self._batches
        return last[-1].autocast if last else None

    def _dropped(self) -> None:
        """Forget batches whose gradients were discarded, as after a step that a gradient scaler skipped.

        This shows when the next batch is drawn or, if the loop calls ``zero_grad`` after that, at its forward pass.
        """
        last = len(self._batches) if self._batches and self._forwards.passes[-1].place < len(self._batches) else 0
        if last > 1 and all(param.grad is None for param in self._params):
            own = self._batches[last - 1 :]
            self.clear()
            self._batches = own

    def watch(self, ids: Tensor, batch: Any) -> None:
        """Add a batch that a loader is about to yield."""
        used = self._batches and any(self._forwards.of_batches(len(self._batches)))
        if used and all(param.grad is None for param in self._params):
            self.clear()
        self._batches.append(Drawn(ids, batch, self._noting(batch), self._forwards.state()))

    def tell(
        self, ids: Tensor, batch: Any, denominator: float | None, autocast: str | None = None
    ) -> Callable[[], None]:
        """Add a batch that the loop names, before or after its forward pass; return a function that removes it."""
        noted = [] if batch is None else self._noting(batch)
        told = Drawn(ids, batch, noted, self._forwards.state(), denominator, autocast)
        self._batches.append(told)
        return lambda: self._take_back(told)

    def _take_back(self, told: Drawn) -> None:
        """Forget a batch that has no gradient, with the forward passes since it was named."""
        if self._batches and self._batches[-1] is told:
            self._moving.check_skipped()
            self._forwards.passes = [one for one in self._forwards.passes if one.place < len(self._batches)]
            self._batches.pop()

    def take(self, *, keep_batches: bool = False) -> Taken:
        """Return what the step just taken was computed from, and start over.

        Batches that no forward pass has used were skipped by the loop, and are left out.
        """
        passes = self._forwards.of_batches(len(self._batches))
        if any(passes) and not all(passes):
            kept = [i for i, own in enumerate(passes) if own]
            self._batches, passes = [self._batches[i] for i in kept], [passes[i] for i in kept]
        micro = tuple(
            Micro(len(one.ids), random_of(own) if own else self._guessed(one), one.denominator)
            for one, own in zip(self._batches, passes, strict=True)
        )
        taken = Taken(
            torch.cat([one.ids for one in self._batches]) if len(self._batches) > 1 else self._batches[0].ids,
            [],
            micro,
            self._forwards.passes[-1].training if self._forwards.passes else self._forwards.training(),
            self._forwards.state() if any(part.random for part in micro) else None,
            tuple(one.batch for one in self._batches) if keep_batches else (),
            self.autocast,
            [leaf for one in self._batches for leaf in one.noted],
        )
        self.clear()
        return taken

    def broken(self) -> tuple[list[int], list[int]]:
        """Return all ids, and those of the examples that hold NaN or infinite values."""
        ids = [int(i) for one in self._batches for i in one.ids]
        bad = [
            int(one.ids[i])
            for one in self._batches
            for i in ([] if one.batch is None else batches.broken(one.batch))
            if i < len(one.ids)
        ]
        return ids, bad

    def clear(self) -> None:
        """Forget the batches: the loop was left, or the step was taken."""
        self._batches = []
        self._forwards.clear()

    def look_no_more(self) -> None:
        """Skip the check of the first forward pass."""
        self._first_pass.release()

    def release(self) -> None:
        """Remove all hooks from the model."""
        self._forwards.release()
        self._first_pass.release()

    def _guessed(self, one: Drawn) -> RandomState | None:
        """Return the generators when a batch was drawn, for models not called as a whole; None if still unchanged."""
        now, before = self._forwards.state(), one.random
        return before if before and not all(torch.equal(before[name], now[name]) for name in now) else None
