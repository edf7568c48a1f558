"""The time that work may take: asked while it goes on, so that it ends in time instead of trusting a prediction."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from leaveout.errors import InputError

T = TypeVar("T")

JUDGED = ((1, 0, 60.0), (2, 1, 10.0), (3, 1, 4.0), (12, 4, 1.3))
"""From how many items on work is judged, by the mean time of those after which, and how far it may seem to exceed.

The first items include one-time work such as tracing, so they are judged leniently.
"""

PRACTICAL = 1.25
"""Suggested budgets are larger than what was measured by this factor."""


class OutOfTimeError(Exception):
    """Work would not end in time; ``seconds`` is how long it would take, as far as its first items show."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"about {seconds:.2g} s")
        self.seconds = seconds


class Clock:
    """Counts the seconds that are left of a budget.

    They are seconds of processor time, those of all threads added up: a busy machine does not shorten the work, and on
    a quiet one it takes no longer than that by a clock on the wall. Where other processes do the work, that is counted
    by the wall.

    >>> clock = Clock(60)
    >>> clock.left > 59, clock.part(0.5).left <= 30, Clock(math.inf).left
    (True, True, inf)
    """

    def __init__(self, seconds: float, *, elsewhere: bool = False) -> None:
        self.seconds = seconds
        self._now: Callable[[], float] = time.perf_counter if elsewhere else time.process_time
        self._start = self._now()

    @property
    def spent(self) -> float:
        """The seconds since it was made."""
        return self._now() - self._start

    @property
    def left(self) -> float:
        """The seconds that are left, 0 or more."""
        return max(0.0, self.seconds - self.spent)

    def part(self, share: float) -> Clock:
        """Return a clock for a share of what is left."""
        part = Clock(0.0)
        part._now, part._start = self._now, self._now()
        part.seconds = share * self.left if share < 1 else self.left
        return part

    def watch(self, items: Iterable[T], total: int) -> Iterator[T]:
        """Yield the items of work; raise OutOfTimeError as soon as they seem to take longer than what is left."""
        times = [self.spent]
        for done, item in enumerate(items):
            if done:
                self._judge(times, done, total)
            yield item
            times.append(self.spent)

    def _judge(self, times: list[float], done: int, total: int) -> None:
        skipped, excess = next((skip, over) for least, skip, over in reversed(JUDGED) if done >= least)
        rest = (times[done] - times[skipped]) / (done - skipped) * (total - done)
        if rest > excess * self.left or not self.left:
            raise OutOfTimeError(times[done] - times[0] + rest)


def practical(seconds: float) -> int:
    """Return a round budget for work that was measured to take so many seconds.

    >>> practical(3.2), practical(61), practical(2345)
    (4, 77, 3000)
    """
    wanted = max(1.0, PRACTICAL * seconds)
    digits = max(0, math.floor(math.log10(wanted)) - 1)
    return math.ceil(wanted / 10**digits) * 10**digits


def check_budget(budget: float) -> None:
    """Refuse what is not a number of seconds."""
    if not (isinstance(budget, int | float) and budget > 0):
        raise InputError(f"budget={budget!r} is not a number of seconds: give more than 0.", code="budget-not-seconds")
