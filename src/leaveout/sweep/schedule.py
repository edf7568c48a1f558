"""At which of its occurrences an example's influence is corrected: at all of them, in chosen epochs, or at random."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from leaveout._util.hashing import mixed
from leaveout.errors import InputError
from leaveout.run.reader import Run
from leaveout.run.record import Record
from leaveout.trajectory.left_out import LeftOut

FIRST = (1, 2)
"""An example's first occurrence has nothing to correct; the first that can be corrected is in the next epoch."""


@dataclass(frozen=True)
class Schedule:
    """Each occurrence is corrected with a probability, within chosen epochs.

    Whether it is depends only on the seed, the step and the row, not on the order in which rows or steps are taken.

    >>> Schedule(0.5).chosen(Record(3, 0, torch.arange(4), [], []), torch.arange(8)).tolist()
    [True, True, False, True, True, False, False, True]
    """

    probability: float = 1.0
    epochs: tuple[int, int] | None = None
    seed: int = 0

    @property
    def always(self) -> bool:
        """Say whether every occurrence is corrected."""
        return self.probability == 1 and self.epochs is None

    def kept(self, record: Record, left_out: LeftOut, row: Int[Tensor, " pairs"]) -> Bool[Tensor, " pairs"] | None:
        """Return which of a step's pairs are corrected; None: all of them."""
        return None if self.always else self.chosen(record, left_out.keys(row))

    def chosen(self, record: Record, keys: Int[Tensor, " pairs"]) -> Bool[Tensor, " pairs"]:
        """Return which of a step's occurrences are corrected; ``keys`` tell their rows apart."""
        if not self.within(record.epoch) or self.probability == 0:
            return torch.zeros(len(keys), dtype=torch.bool)
        if self.probability == 1:
            return torch.ones(len(keys), dtype=torch.bool)
        return torch.from_numpy(_uniform(self.seed, record.index, keys.numpy()) < self.probability)

    def within(self, epoch: int) -> bool:
        """Say whether an epoch is among the chosen ones."""
        return self.epochs is None or self.epochs[0] <= epoch < self.epochs[1]

    def check(self, run: Run) -> None:
        """Refuse a choice of epochs if epochs were not recorded."""
        if self.epochs is not None and run.record(len(run) - 1).epoch == 0:
            raise InputError(
                "epochs= was given, but this run has one epoch only, or its loop did not say where epochs begin: "
                "record with recorder.watch(loader), or recorder.step(ids, batch, epoch=...).",
                code="epochs-not-recorded",
            )


def schedule_of(probability: float, epochs: int | str | tuple[int, int] | None, seed: int) -> Schedule:
    """Return the schedule that an estimator's options ask for.

    >>> schedule_of(1.0, 4, 0).epochs, schedule_of(1.0, "first", 0).epochs
    ((0, 4), (1, 2))
    """
    if not 0 <= probability <= 1:
        raise InputError(
            f"probability={probability} is not a probability: give a number between 0 and 1.",
            code="probability-out-of-range",
        )
    if epochs == "first":
        epochs = FIRST
    elif isinstance(epochs, int):
        epochs = (0, epochs)
    if epochs is not None and not (
        isinstance(epochs, tuple | list) and len(epochs) == 2 and 0 <= int(epochs[0]) < int(epochs[1])
    ):
        raise InputError(
            f"epochs={epochs!r} does not choose epochs: give how many of the first, a (start, stop) pair counted from "
            "0, or 'first'.",
            code="epochs-not-a-choice",
        )
    return Schedule(float(probability), None if epochs is None else (int(epochs[0]), int(epochs[1])), seed)


def _uniform(seed: int, step: int, keys: np.ndarray) -> np.ndarray:
    """Draw a number in [0, 1) for each key: the same in any order."""
    start = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03) % 2**64
    x = keys.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(start)
    return (mixed(x) >> np.uint64(11)) / 2.0**53
