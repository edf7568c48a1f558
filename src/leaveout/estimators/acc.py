"""ACC-SGD-IE: the counterfactual step, linearised around the recorded state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

from leaveout.diff.hessian import Hessian
from leaveout.estimators.base import Estimator, titled
from leaveout.estimators.choice import KINKS, Choice
from leaveout.run.reader import Run
from leaveout.sweep.schedule import schedule_of
from leaveout.sweep.transports import Subspace
from leaveout.task.task import Task


@dataclass(frozen=True)
class ACC(Estimator):
    """δ ← ∂F_i(s_i; w^{−k})·δ + Γ_{k,i}.

    For plain SGD ``δ ← (I − α_i H(Z_i) + (α_i/|Z_i|) H(z_k))·δ + (α_i/|Z_i|) g(z_k, θ_i)`` at the steps that use z_k:
    when an example is left out, so is its curvature. Linear in δ but not in the example's weight; exact wherever the
    loss is quadratic. Equivalently, SGD-IE with ``g(z_k) + H(z_k)·δ_k`` read in place of ``g(z_k)``.

    If the step is not linear in the gradient (the Adam family), the jump reads the finite change of the step with
    SGD-IE's backward vector u: ``score_k = Σ_{i: k∈Z_i} ⟨u_{i+1}, O(s_i, ḡ_i − g(z_k)/|Z_i|) − O(s_i, ḡ_i)⟩``. That is
    the first term of the correction, and nearly all of it there. It is not a transport: it does not involve δ.

    Cost: free transport, one HVP per step for one query, and otherwise one more than the number of query vectors,
    whatever the number of examples; jump, SGD-IE's cost and the batch's per-example gradients; exact transport, one
    HVP per step and example.

    Args:
        transport: how δ gets from one occurrence to the next: ``"free"`` (without curvature), ``"subspace"`` or
            ``Subspace(rank)`` (with curvature in the most curved directions), ``"jump"`` (not at all: the finite
            change of the step is read instead), or ``"exact"``. The default is free for SGD, jump for optimizers whose
            step is not linear in the gradient, and exact for displacements and for the exact readout.
        readout: ``"linear"``, ``"outputs"``, or, with exact transport, ``"exact"``.
        sketch: store each example's remainder in a random projection of this width (free transport, one query); by
            default it is stored whole, on disk if it does not fit into memory.
        direction: ``"forward"`` carries displacements (with a cheap transport: the corrected-gradient order),
            ``"backward"`` a remainder per row (the remainder order, one query at a time); ``"auto"`` is the cheaper.
        layers: only these parameters are displaced: names or patterns such as ``"head.*"``.
        probability: each occurrence is corrected with this probability, and otherwise treated as in SGD-IE.
        epochs: which epochs are corrected: the number of first ones, a (start, stop) pair, or ``"first"``: the first
            occurrence at which there is something to correct.
        seed: for the random choice.
        kinks: give the kinks of ReLU, leaky ReLU, hardtanh, ReLU6, abs and clamp in the model their curvature in H;
            ``"auto"``: unless they are crossed in leaps, which is determined from a few steps of the run.
    """

    transport: str | Subspace = "auto"
    readout: str = "linear"
    sketch: int | None = None
    direction: str = "auto"
    _: KW_ONLY
    layers: str | Sequence[str] | None = None
    probability: float = 1.0
    epochs: int | str | tuple[int, int] | None = None
    seed: int = 0
    kinks: bool | str = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transport == "subspace":
            object.__setattr__(self, "transport", Subspace())
        self.choice()

    @property
    def name(self) -> str:
        """The method's name."""
        options = {
            "transport": self.transport,
            "kinks": KINKS[self.kinks],
            "readout": self.readout,
            "sketch": None if self.sketch is None else f"sketch {self.sketch}",
            "layers": self.layers,
            "probability": None if self.probability == 1 else f"probability {self.probability}",
            "epochs": None if self.epochs is None else f"epochs {self.epochs}",
        }
        return titled("ACC", options)

    def resolved(self, run: Run, task: Task | None = None, *, displacements: bool = False) -> ACC:
        """Choose the transport that suits the run and the question."""
        if self.transport != "auto":
            return self
        # Clipping is not linear in the gradient, and BatchNorm's gradient is not linear in the examples' weights.
        clipped = task is not None and task.objective.clip is not None
        # In packed sequences it is not known which draw belongs to which example: none can be computed alone.
        shared = (
            task is not None
            and task.objective.called.packs
            and any(part.random is not None for part in run.record(0).parts)
        )
        linear = run.rule.linear and not clipped and not run.manifest.buffers and not shared
        if displacements or self.readout == "exact" or self.direction == "forward":
            linear = linear and not displacements and self.readout != "exact"
            return replace(self, transport="free" if linear else "exact")
        return replace(self, transport="free" if linear else "jump")

    def choice(self) -> Choice:
        """Return the Hessian, and the corrected gradient."""
        where = schedule_of(self.probability, self.epochs, self.seed)
        options = (self.readout, self.direction, self.transport, self.sketch, where)
        return Choice(Hessian, *options, kinks=self.kinks)
