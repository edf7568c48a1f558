"""One step as it was taken, without its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from leaveout.optim import Hyper
from leaveout.optim.averaging import Update
from leaveout.run.micro import Micro
from leaveout.task import batches
from leaveout.task.draws import RandomState


@dataclass(frozen=True)
class Record:
    """One step as it was taken: everything but the state.

    ``micro`` are its micro-batches in order, which share ids and fingerprint; ``training`` the modules in training
    mode, None where that was not recorded; ``after`` the random generators after it, which is kept with states;
    ``batches`` what the loader yielded, on its way to disk where it has to be kept; ``places`` each parameter's row of
    ``hypers``, on its way to disk where that is not its group's; ``average`` what became of the weights' average
    after it; ``scale`` what the loss was multiplied by, and the gradient divided by (``GradScaler``); ``unhashed``
    what fingerprints are taken of, on its way to disk.
    """

    index: int
    epoch: int
    ids: Int[Tensor, " batch"]
    hypers: list[Hyper]
    fingerprint: list[tuple[int, int]]
    micro: tuple[Micro, ...] = ()
    training: tuple[str, ...] | None = None
    after: RandomState | None = None
    batches: tuple[Any, ...] = ()
    autocast: str | None = None
    places: tuple[int, ...] | None = None
    average: Update | None = None
    scale: float = 1.0
    unhashed: Sequence[Any] = ()

    @property
    def parts(self) -> tuple[Micro, ...]:
        """The micro-batches, also where there is but one."""
        return self.micro or (Micro(len(self.ids)),)


def prints(taken: Sequence[Any]) -> list[list[tuple[int, int]]]:
    """Return the fingerprints of steps' batches, taking those that were left for later."""
    later = batches.fingerprints([one.unhashed for one in taken])
    return [found or one.fingerprint for found, one in zip(later, taken, strict=True)]
