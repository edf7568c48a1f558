"""Exact replays of as many rows as fit into the time that is left, in parts that grow with what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout.compute.clock import Clock, OutOfTimeError, practical
from leaveout.compute.cost import Cost
from leaveout.scores import Scores

Truth: TypeAlias = Callable[[Sequence[int], Clock], Scores]
"""The exact scores of some rows; raises OutOfTimeError if they take too long."""

FIRST, GROWTH = 8, 8
"""Rows in the first part, and how many times as large the next one may be: larger stacks take other times per row."""

SAFE = 0.9
"""The share of the time left that a part may seem to take."""


class Replays:
    """Replays of rows, done in the order in which they are asked for.

    Args:
        truth: replays some rows.
        rate: seconds per model, if that is known: each part has a model per row, and one with every example.
    """

    def __init__(self, truth: Truth, rate: float | None = None) -> None:
        self.rows: list[int] = []
        self.cost = Cost()
        self.parts: list[Scores] = []
        self._truth, self._next = truth, rate  # and what the next part is assumed to take per model
        self._rates: list[float] = []
        self._most: float = FIRST if rate is None else math.inf

    @property
    def values(self) -> Float[Tensor, "rows queries"]:
        """The exact scores of the rows, in their order."""
        return torch.cat([part.values for part in self.parts])

    def seconds(self, count: int) -> float:
        """Predict the seconds for so many more rows from the best part, which is usually the largest."""
        return min([self._next or 0.0] if not self._rates else self._rates) * (count + 1)

    @property
    def rate(self) -> float | None:
        """Seconds per model, as the last part had it, or what was given."""
        return self._rates[-1] if self._rates else self._next

    def fitting(self, count: int, clock: Clock) -> int:
        """Return how many of so many rows fit into the time left, as far as that is known."""
        if clock.left == math.inf or not count:
            return count
        fits = math.inf if not self._next else SAFE * clock.left / self._next - 1
        return int(max(0, min(count, fits))) if clock.left else 0

    def take(self, rows: Sequence[int], clock: Clock) -> bool:
        """Replay these rows; return whether all of them fitted."""
        waiting = list(rows)
        while waiting:
            size = self.fitting(len(waiting), clock)
            if clock.left < math.inf:
                size = int(min(size, self._most))
            if not size:
                return False
            start = clock.spent
            try:
                found = self._truth(waiting[:size], clock)
            except OutOfTimeError as error:
                self._next, self._most = error.seconds / (size + 1), max(1, size // 2)
                continue
            self._next, self._most = (clock.spent - start) / (size + 1), GROWTH * size
            self._rates.append(self._next)
            self.rows += waiting[:size]
            self.parts.append(found)
            self.cost = self.cost + found.cost
            waiting = waiting[size:]
        return True


def shortened(fitted: str, clock: Clock, more: float) -> str:
    """Say what fitted into a budget, and which one suffices for all.

    >>> shortened("8 of 64 replays", Clock(60), 200)[:60]
    '8 of 64 replays fitted into 60 s of processor time; budget=2'
    """
    suffices = practical(clock.spent + more)
    return f"{fitted} fitted into {clock.seconds:g} s of processor time; budget={suffices} for all."
