"""Weight averages (EMA, SWA) as one more slot of the state: after each step ``average ← a·average + b·θ``.

The slot is linear in all its inputs and nothing depends on it, so derivatives pass through it at no extra cost.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from leaveout.optim.definition import Hyper, Values

AVERAGE = "average"
"""The slot's name; only runs whose averaged model was recorded have the slot."""


class Update(NamedTuple):
    """How the average changed after a step; the model's buffers may be averaged differently from its parameters.

    ``models`` is the number of models averaged by then, as in ``AveragedModel.n_averaged``.
    """

    kept: float = 1.0
    added: float = 0.0
    buffers_kept: float = 1.0
    buffers_added: float = 0.0
    models: float = 0.0

    def then(self, other: Update) -> Update:
        """Combine this update with one that follows it, for the same weights.

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
        """Return the update as hyperparameters of a step that was read from disk."""
        return {f"{AVERAGE}_{name}": value for name, value in self._asdict().items()}


def shares(hyper: Values, *, buffers: bool = False) -> tuple[float, float]:
    """Return the share of the average that a step kept, and the share of the new weights that it added."""
    kind = "buffers_" if buffers else ""
    return hyper.get(f"{AVERAGE}_{kind}kept", 1.0), hyper.get(f"{AVERAGE}_{kind}added", 0.0)


def mixed(average: Tensor, new: Tensor, share: tuple[float, float]) -> Tensor:
    """Compute a·average + b·new, without arithmetic if nothing changes."""
    kept, added = share
    if (kept, added) == (1.0, 0.0):
        return average
    return new * added if kept == 0 else average * kept + new * added
