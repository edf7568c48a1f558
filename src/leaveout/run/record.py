"""One recorded step, without its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from leaveout._util.generators import RandomState
from leaveout.optim import Hyper
from leaveout.optim.averaging import Update
from leaveout.run.micro import Micro


@dataclass(frozen=True)
class Record:
    """One recorded step: everything but the state.

    ``micro`` are its micro-batches in order, which share ids and fingerprint; ``training`` the modules in training
    mode, None if that was not recorded; ``after`` the random generators after the step, stored with kept states;
    ``batches`` what the loader yielded, set only until it is written, if batches are kept; ``places`` each parameter's
    row of ``hypers``, set only until it is written, if it is not its group's row; ``average`` how the average of the
    weights was updated after the step; ``scale`` the factor by which the loss was multiplied and the gradient divided
    (``GradScaler``); ``unhashed`` the values to fingerprint, set only until the step is written.
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
        """The micro-batches, even if there is only one."""
        return self.micro or (Micro(len(self.ids)),)
