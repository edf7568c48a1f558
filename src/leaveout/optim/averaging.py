"""Averages of weights (EMA, SWA) as one more slot of the state: after each step ``average ← a·average + b·θ``.

The slot is linear in everything and nothing depends on it, so every derivative goes through it for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from leaveout.optim.definition import Hyper, Values

AVERAGE = "average"
"""The slot; in runs whose averaged model was recorded."""


class Update(NamedTuple):
    """What became of the average after a step; the model's buffers may be averaged otherwise than its parameters.

    ``models`` is how many models have been averaged by then, as ``AveragedModel.n_averaged`` has it.
    """

    kept: float = 1.0
    added: float = 0.0
    buffers_kept: float = 1.0
    buffers_added: float = 0.0
    models: float = 0.0

    def then(self, other: Update) -> Update:
        """One update after the other, with the same weights.

        >>> Update(0.5, 0.5).then(Update(0.5, 0.5))[:2]
        (0.25, 0.75)
        """
        return Update(
            other.kept * self.kept,
            other.kept * self.added + other.added,
            other.buffers_kept * self.buffers_kept,
            other.buffers_kept * self.buffers_added + other.buffers_added,
            other.models,
        )

    def columns(self) -> Hyper:
        """As hyperparameters of a step that was read."""
        return {f"{AVERAGE}_{name}": value for name, value in self._asdict().items()}


def shares(hyper: Values, *, buffers: bool = False) -> tuple[float, float]:
    """What a step kept of the average, and what it added of the new weights."""
    kind = "buffers_" if buffers else ""
    return hyper.get(f"{AVERAGE}_{kind}kept", 1.0), hyper.get(f"{AVERAGE}_{kind}added", 0.0)


def mixed(average: Tensor, new: Tensor, share: tuple[float, float]) -> Tensor:
    """a·average + b·new, without arithmetic where nothing changes."""
    kept, added = share
    if (kept, added) == (1.0, 0.0):
        return average
    return new * added if kept == 0 else average * kept + new * added
