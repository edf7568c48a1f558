"""Whether there is a truth to predict: how well exact replays agree with each other when the start moves a little."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd
import torch

from leaveout._util.files import or_null
from leaveout.compute.clock import OutOfTimeError
from leaveout.compute.cost import Cost
from leaveout.estimators.question import Question
from leaveout.estimators.replay import Replay
from leaveout.evaluate.metrics.agreement import Interval, kendall, repeatability
from leaveout.evaluate.smoothness import advice, listed
from leaveout.scores import SELF, Scores

MOVE = "move "
"""The prefix of the columns with true changes from moved starts."""

REPRODUCIBLE = 0.5
"""Effects count as reproducible if the mean tau between starts is at least this."""
FOLLOWED = 0.5
"""If the scores' tau with the mean over starts is at least this, a bad verdict may only be due to too few replays."""

GROUPS, FACTOR = 24, 4
"""The number of random groups per size, and how much larger the next size is."""


@dataclass(frozen=True)
class Ceiling:
    """How reproducible the truth is: mean tau between the true changes from the recorded and the moved starts.

    ``extreme`` and ``random`` are those of the two replayed samples, ``agreement`` is the scores' tau with the mean
    over all starts in each. ``groups`` has the mean tau of random groups by their size, as far as it was measured;
    ``advice`` says what to change in the training.
    """

    moves: int
    jitter: float
    extreme: Interval
    random: Interval
    agreement: dict[str, float]
    groups: dict[int, float]
    single: bool
    advice: tuple[str, ...] = ()

    @property
    def reproducible(self) -> bool:
        """Say whether the effects of both samples are reproducible."""
        return all(part.value >= REPRODUCIBLE for part in (self.extreme, self.random))

    @property
    def undecided(self) -> bool:
        """Say whether a bad verdict is due to a wide interval: effects are reproducible, and scores rank like them."""
        return self.reproducible and all(tau >= FOLLOWED for tau in self.agreement.values())

    @property
    def size(self) -> int | None:
        """The group size from which on effects are reproducible; None if they are not at any size that was tried."""
        if self.reproducible and self.single:
            return 1
        return next((size for size, tau in self.groups.items() if tau >= REPRODUCIBLE), None)

    def diagnosis(self, right: bool, *, few: bool = False) -> str:
        """Say why scores and replays disagree, if they do, and what to do about it.

        Args:
            right: whether the scores rank like the replays of the recorded run, at least overall.
            few: whether there are too few replays to tell.
        """
        mean = " and ".join(f"{self.agreement[sample]:.2f}" for sample in ("extreme", "random"))
        means = f"with their mean the scores agree at tau {mean}"
        if self.reproducible and right:
            return f"{self._starts} ({self._taus}): there is a truth, and the scores follow it; {means}."
        if self.undecided or few:
            return (
                f"{self._starts} ({self._taus}), so there is a truth, and the scores may well follow it ({means}): "
                "these replays are too few to tell. Replay more, or the examples that matter (lo.refine)."
            )
        if self.reproducible:
            return (
                f"{self._starts} ({self._taus}), so the scores are wrong ({means}): take another method (lo.choose), "
                "or replay the examples that matter (lo.refine)."
            )
        if self.largest:
            return (
                f"{self._starts} on the largest effects only ({self._taus}; {means}): the others are too small to be "
                f"reproducible in this run, so rely on the extremes, and for the rest look at groups{self._sized} or "
                "labels."
            )
        return (
            f"{self._starts} at {self._taus} only: {self._what} have no reproducible effect in this run, and no score "
            f"can rank them ({means}). {self._instead}"
        )

    def of_exact(self) -> str:
        """Say whether exact scores are a property of the training, and what to do if they are not."""
        if self.reproducible:
            return f"{self._starts} ({self._taus}): the effects are a property of the training, not of its last digits."
        if self.largest:
            return (
                f"{self._starts} on the largest effects only ({self._taus}): the others change with the last digits of "
                f"the start, so rely on the extremes, and for the rest look at groups{self._sized} or labels."
            )
        return (
            f"{self._starts} at {self._taus} only: {self._what} have no reproducible effect in this run, and exact "
            f"scores answer for its last digits alone. {self._instead}"
        )

    @property
    def largest(self) -> bool:
        """Say whether at least the effects of the most extreme sample are reproducible."""
        return self.extreme.value >= REPRODUCIBLE

    @property
    def short(self) -> str:
        """What is reproducible, in a few words."""
        if self.reproducible:
            return "and reproducible"
        return "but only the largest effects are reproducible" if self.largest else f"but {self.nothing}"

    @property
    def nothing(self) -> str:
        """That there is no effect, in a few words."""
        return f"{self._what} have no reproducible effect"

    @property
    def _what(self) -> str:
        return "single examples" if self.single else "these groups"

    @property
    def _starts(self) -> str:
        return f"Exact replays from {self.moves + 1} starts {self.jitter:g} apart agree with each other"

    @property
    def _taus(self) -> str:
        return f"tau {self.extreme} among the most extreme and {self.random} among those drawn at random"

    @property
    def _instead(self) -> str:
        retrain = f", or train with {listed(self.advice)}" if self.advice else ""
        return f"Look at groups{self._sized} or labels{retrain}."

    @property
    def _sized(self) -> str:
        if self.size is not None:
            return f" (reproducible from about {self.size} examples on)"
        return f" (of more than {max(self.groups)} examples)" if self.groups else ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        plain = asdict(self)
        for name in ("extreme", "random", "agreement"):
            plain[name] = {key: or_null(value) for key, value in plain[name].items()}
        return {**plain, "groups": {str(size): or_null(tau) for size, tau in self.groups.items()}}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Ceiling:
        """Read what ``to_json`` returned."""
        extreme, random = (Interval(**_numbers(plain[name])) for name in ("extreme", "random"))
        agreement = _numbers(plain["agreement"])
        groups = {int(size): tau for size, tau in _numbers(plain["groups"]).items()}
        words = tuple(map(str, plain["advice"]))
        numbers = int(plain["moves"]), float(plain["jitter"])
        return cls(*numbers, extreme, random, agreement, groups, bool(plain["single"]), words)


def ceiling_of(
    table: pd.DataFrame, scores: Scores, question: Question, seed: int, jitter: float, *, sizes: bool
) -> tuple[Ceiling, Cost]:
    """Return the ceiling from a check's table with its moves, and the cost of replaying groups if sizes are needed."""
    columns = ["truth", *(name for name in table if str(name).startswith(MOVE))]
    parts = {str(name): part for name, part in table.groupby("sample")}
    repeat = {name: repeatability([part[column] for column in columns]) for name, part in parts.items()}
    agreement = {name: kendall(part["score"], part[columns].mean(axis=1)) for name, part in parts.items()}
    groups: dict[int, float] = {}
    cost = Cost()
    queried = scores.groups is None and scores.queries != SELF
    if sizes and queried and not all(part.value >= REPRODUCIBLE for part in repeat.values()):
        groups, cost = group_sizes(question, seed, jitter)
    ceiling = Ceiling(
        *(len(columns) - 1, jitter, repeat["extreme"], repeat["random"], agreement),
        *(groups, scores.groups is None, advice(question.run, question.task)),
    )
    return ceiling, cost


def group_sizes(question: Question, seed: int, jitter: float) -> tuple[dict[int, float], Cost]:
    """Compute tau between the recorded and a moved start for random groups of 4, 16, 64, ... examples, up to a quarter.

    Stops at the first size whose effects are reproducible, or when the time is over.
    """
    order, taus, cost = torch.Generator().manual_seed(seed), {}, Cost()
    size, examples = FACTOR, question.task.size
    while size <= examples // 4:
        groups = [torch.randperm(examples, generator=order)[:size].tolist() for _ in range(GROUPS)]
        asked = replace(question, groups=groups)
        try:
            recorded, moved = (replay.answer(asked) for replay in (Replay(), Replay(move=seed + 1, jitter=jitter)))
        except OutOfTimeError:
            break
        cost = cost + recorded.cost + moved.cost
        taus[size] = kendall(recorded.mean(), moved.mean())
        if taus[size] >= REPRODUCIBLE:
            break
        size *= FACTOR
    return taus, cost


def _numbers(plain: dict[str, Any]) -> dict[str, float]:
    return {key: math.nan if value is None else float(value) for key, value in plain.items()}
