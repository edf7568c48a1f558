"""Which states of a run are written to disk, and how, within the budget that kept batches share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from leaveout._util.amounts import parse_bytes
from leaveout._util.trees import State, nbytes
from leaveout.errors import InputError
from leaveout.optim import Hyper, Rule
from leaveout.run.gradient_states import StepGradients, StorageChoice
from leaveout.run.kept_batches import BatchBudget

if TYPE_CHECKING:
    from leaveout.run.reader import Run


class Keep:
    """Decides which states are worth their disk space.

    All of them until half of the budget is used; after that gaps grow with √i, and faster the less is left.
    The first and the last state are kept in any case, so room for two is left.

    >>> keep = Keep("auto", budget=12)
    >>> [i for i in range(1, 10_000) if keep.wants(i) and keep.note(i, 1) is None]
    [1, 2, 3, 4, 5, 6, 11, 18, 36, 108]
    """

    def __init__(self, keep: str | int, budget: int) -> None:
        if keep not in ("all", "auto") and not (isinstance(keep, int) and keep >= 1):
            raise InputError(
                f"keep={keep!r} is unknown: use 'all', 'auto', or a number K for every K-th state.", code="keep-unknown"
            )
        self._keep, self._budget = keep, budget
        self._used = self._largest = 0
        self._next: float = 1

    def wants(self, index: int) -> bool:
        """Say whether the state before step ``index`` is kept."""
        if isinstance(self._keep, int):
            return index % self._keep == 0
        return self._keep == "all" or index >= self._next

    def note(self, index: int, size: int) -> None:
        """Note that the state was kept, and how much space it took."""
        self._used += size
        self._largest = max(self._largest, size)
        more = (self._budget - self._used) // max(1, self._largest) - 2
        if self._used < self._budget / 2 and more > 0:
            self._next = index + 1
        elif more > 0:  # gaps of 2√i keep about √N of N states
            self._next = index + max(1, round(2 * index**0.5), round(2 * index / more))
        else:
            self._next = math.inf


class Storage:
    """What goes to disk besides the steps: states, whole or as the gradients that led to them, and kept batches.

    Args:
        keep: which states.
        disk: the budget for both.
        rule: the optimizer that is recorded.
    """

    def __init__(self, keep: str | int, disk: str | int, rule: Rule) -> None:
        budget = parse_bytes(disk, "disk")
        self._keep, self._batches, self._choice = Keep(keep, budget), BatchBudget(budget), StorageChoice(rule)
        self.begin, self.note_in_place_writes = self._choice.begin, self._choice.note_in_place_writes
        self.note = self._keep.note

    def resume(self, run: Run) -> None:
        """Count the states that a resumed run has on disk."""
        size = nbytes(run.final())
        for index in run.kept[1:]:
            self.note(index, size)

    def batches(self, kept: Sequence[Any], steps: int) -> int:
        """Count the bytes of a step's kept batches; refuse them if they exceed the budget."""
        return sum(self._batches.take(batch, steps) for batch in kept)

    def state(
        self, index: int, given: Callable[[], StepGradients | None], hypers: list[Hyper], state: Callable[[], State]
    ) -> tuple[State | StepGradients | None, int]:
        """Return what is stored of the state before step ``index``, and its bytes; None if it is not kept."""
        if not self._keep.wants(index):
            return None, 0
        stored = self._choice.stored(index, given, hypers, state)
        size = self._choice.size(stored)
        self._keep.note(index, size)
        return stored, size
