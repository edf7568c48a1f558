"""TracIn: what each occurrence did to the parameters, without asking what later steps made of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from leaveout.estimators.base import Estimator, Request, swept
from leaveout.readout import readout_of
from leaveout.vectors import Params


@dataclass(frozen=True)
class TracIn(Estimator):
    """δ ← δ + γ: no transport.

    For plain SGD with the linear readout, ``score_k = Σ_{i: k∈Z_i} (α_i/|Z_i|) ⟨∇L(query, θ_N), g(z_k, θ_i)⟩``.
    The query gradient is taken at the final parameters, the end at which every estimator here reads.

    Cost: one gradient a step, whatever the number of examples.
    """

    readout: str = "linear"
    direction: str = "auto"

    @property
    def name(self) -> str:
        """The method's name."""
        return "TracIn" if self.readout == "linear" else f"TracIn({self.readout})"

    def _values(self, request: Request) -> tuple[Tensor, Params | None]:
        sweep = request.sweep(curved=False, corrected=False)
        return swept(request, readout_of(self.readout), self.direction, sweep)
