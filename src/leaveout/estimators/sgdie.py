"""SGD-IE: the exact derivative of training with respect to an example's weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leaveout.diff.hessian import Hessian
from leaveout.estimators.base import Estimator, titled
from leaveout.estimators.choice import KINKS, Choice


@dataclass(frozen=True)
class SGDIE(Estimator):
    """δ ← ∂F_i(s_i; w¹)·δ + γ_{k,i}.

    For plain SGD ``δ ← (I − α_i H(Z_i))·δ + (α_i/|Z_i|) g(z_k, θ_i)``. For momentum, Adam and others the state carries
    the optimizer's buffers. This is the derivative of the whole training run in the example's weight, the quantity
    that metagradient methods (MAGIC among them) compute.

    Cost: backward, one Hessian-vector product per step and query vector, whatever the number of examples; forward,
    one per step and example.

    Args:
        readout: ``"linear"``, ``"outputs"`` or ``"exact"``.
        direction: ``"forward"``, ``"backward"``, or the cheaper one.
        layers: only these parameters are displaced: names or patterns such as ``"head.*"``.
        kinks: give the kinks of ReLU, leaky ReLU, hardtanh, ReLU6, abs and clamp in the model their curvature in H;
            ``"auto"``: unless they are crossed in leaps, which is determined from a few steps of the run.
    """

    readout: str = "linear"
    direction: str = "auto"
    layers: str | Sequence[str] | None = None
    kinks: bool | str = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choice()

    @property
    def name(self) -> str:
        """The method's name."""
        return titled("SGD-IE", {"kinks": KINKS[self.kinks], "readout": self.readout, "layers": self.layers})

    def choice(self) -> Choice:
        """Return its curvature, and what is read."""
        return Choice(Hessian, self.readout, self.direction, kinks=self.kinks)
