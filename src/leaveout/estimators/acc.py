"""ACC-SGD-IE: the counterfactual step, linearised around the recorded state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from leaveout.errors import InputError
from leaveout.estimators.base import Estimator, Request, swept
from leaveout.readout import readout_of
from leaveout.vectors import Params


@dataclass(frozen=True)
class ACC(Estimator):
    """δ ← ∂F_i(s_i; w^{−k})·δ + Γ_{k,i}.

    For plain SGD ``δ ← (I − α_i H(Z_i) + (α_i/|Z_i|) H(z_k))·δ + (α_i/|Z_i|) g(z_k, θ_i)`` at the steps that use z_k:
    once an example is out, its curvature is out too. Linear in δ but not in the example's weight; exact wherever the
    loss is quadratic. Equivalently, SGD-IE with ``g(z_k) + H(z_k)·δ_k`` read in place of ``g(z_k)``.

    Cost of the exact transport: one Hessian-vector product a step and example.

    Args:
        transport: how δ gets from one occurrence to the next; ``"exact"``.
        readout: ``"linear"``, ``"outputs"`` or ``"exact"``.
        direction: ``"forward"``, ``"backward"``, or the cheaper one.
    """

    transport: str = "exact"
    readout: str = "linear"
    direction: str = "auto"

    def __post_init__(self) -> None:
        if self.transport != "exact":
            raise InputError(f"transport={self.transport!r} is unknown: use 'exact'.")

    @property
    def name(self) -> str:
        """The method's name."""
        return f"ACC({self.transport})"

    def _values(self, request: Request) -> tuple[Tensor, Params | None]:
        sweep = request.sweep(curved=True, corrected=True)
        return swept(request, readout_of(self.readout), self.direction, sweep)
