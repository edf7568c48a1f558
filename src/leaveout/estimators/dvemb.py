"""DVEmb: trajectory embeddings with a curvature made of first derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from leaveout.diff.hessian import Hessian
from leaveout.diff.operator import StepOperator
from leaveout.diff.outer import Fisher, GaussNewton
from leaveout.errors import InputError
from leaveout.estimators.base import Estimator, titled
from leaveout.estimators.choice import Choice
from leaveout.run.reader import Run
from leaveout.sweep.transports import Subspace
from leaveout.task.task import Task

KINDS: dict[str, type[StepOperator]] = {"ggn": GaussNewton, "fisher": Fisher, "hessian": Hessian}


@dataclass(frozen=True)
class DVEmb(Estimator):
    """δ ← (I − α_i C(Z_i))·δ + (α_i/|Z_i|) g(z_k, θ_i), with C in place of SGD-IE's Hessian.

    The data value embedding of Wang et al. (2025), "Capturing the Temporal Dependence of Training Data Influence",
    summed over an example's occurrences. They name the Gauss-Newton matrix and compute with the examples' gradient
    outer products, ``C = (1/|Z|) Σ g gᵀ``, in a random projection: that is ``curvature="fisher", project=...``. The
    default is the Gauss-Newton matrix itself, ``C = (1/|Z|) Σ Jᵀ(∂²ℓ)J``, which is the Hessian wherever the outputs are
    linear in the parameters. For other optimizers the same C replaces the Hessian in their linearised step.

    ``acc=True`` is ACC-DVEmb, ``δ ← (I − α_i C(Z_i) + (α_i/|Z_i|) C(z_k))·δ + ...``: the example's own curvature is
    left out with it. With ``curvature="hessian"`` it is ACC.

    Cost: that of SGD-IE, or of ACC, with a Gauss-Newton product (forward mode, then backward) in place of each HVP.

    Args:
        curvature: ``"ggn"``, ``"fisher"`` (gradient outer products) or ``"hessian"``; or a class of your own, derived
            from ``leaveout.diff.operator.StepOperator``.
        project: apply a seeded random projection of this width to the gradients of each parameter group.
        acc: correct with the example's own curvature.
        transport: how the correction's displacement is transported, as for ``ACC``.
        readout: ``"linear"``, ``"outputs"`` or ``"exact"``.
        layers: only these parameters are displaced: names or patterns such as ``"head.*"``.
    """

    curvature: str | type[StepOperator] = "ggn"
    project: int | None = None
    acc: bool = False
    transport: str | Subspace = "auto"
    readout: str = "linear"
    layers: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        own = isinstance(self.curvature, type) and issubclass(self.curvature, StepOperator)
        if not own and self.curvature not in KINDS:
            raise InputError(
                f"curvature={self.curvature!r} is unknown: use one of {', '.join(map(repr, KINDS))}.",
                code="curvature-unknown",
            )
        if self.transport == "subspace":
            object.__setattr__(self, "transport", Subspace())
        if self.transport != "auto":
            self.choice()

    @property
    def name(self) -> str:
        """The method's name."""
        options = {
            "curvature": self.curvature if isinstance(self.curvature, str) else self.curvature.__name__,
            "project": None if self.project is None else f"project {self.project}",
            "transport": self.transport if self.acc else None,
            "readout": self.readout,
            "layers": self.layers,
        }
        return titled("ACC-DVEmb" if self.acc else "DVEmb", options)

    def resolved(self, run: Run, task: Task | None = None, *, displacements: bool = False) -> DVEmb:  # noqa: ARG002
        """Choose the transport that suits the run and the question."""
        if self.transport != "auto" or not self.acc:
            return self
        exact = not run.rule.linear or displacements or self.readout == "exact" or self.project is not None
        return replace(self, transport="exact" if exact else "free")

    def choice(self) -> Choice:
        """Return its curvature, and what is read."""
        transport = self.transport if self.acc else None
        kind = KINDS[self.curvature] if isinstance(self.curvature, str) else self.curvature
        return Choice(kind, self.readout, transport=transport, project=self.project)
