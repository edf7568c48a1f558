"""ACC-SGD-IE: the counterfactual step, linearised around the recorded state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from jaxtyping import Float
from torch import Tensor

from leaveout.carriers import Subspace
from leaveout.corrected import Correction, Products
from leaveout.errors import InputError
from leaveout.estimators.base import Estimator, Request, swept
from leaveout.readout import Projected, readout_of
from leaveout.store import Run
from leaveout.vectors import Params, height


@dataclass(frozen=True)
class ACC(Estimator):
    """δ ← ∂F_i(s_i; w^{−k})·δ + Γ_{k,i}.

    For plain SGD ``δ ← (I − α_i H(Z_i) + (α_i/|Z_i|) H(z_k))·δ + (α_i/|Z_i|) g(z_k, θ_i)`` at the steps that use z_k:
    once an example is out, its curvature is out too. Linear in δ but not in the example's weight; exact wherever the
    loss is quadratic. Equivalently, SGD-IE with ``g(z_k) + H(z_k)·δ_k`` read in place of ``g(z_k)``.

    Cost: free transport, one Hessian-vector product a step for one query and one more than there are query vectors
    otherwise, whatever the number of examples; exact transport, one a step and example.

    Args:
        transport: how δ gets from one occurrence to the next: ``"free"`` (without curvature), ``"subspace"`` or
            ``Subspace(rank)`` (with curvature in the most curved directions), or ``"exact"``. By default free, and
            exact where free cannot serve: for Adam and AdamW, for displacements and for the exact readout.
        readout: ``"linear"``, ``"outputs"``, or, with exact transport, ``"exact"``.
        sketch: keep what is remembered of each example in a random projection of this width (free transport, one
            query); by default it is kept whole, on disk where memory does not hold it.
        direction: ``"forward"`` carries displacements (with a cheap transport: the corrected-gradient order),
            ``"backward"`` a remainder a row (the remainder order, one query at a time); ``"auto"`` takes the cheaper.
    """

    transport: str | Subspace = "auto"
    readout: str = "linear"
    sketch: int | None = None
    direction: str = "auto"

    def __post_init__(self) -> None:
        if self.transport == "subspace":
            object.__setattr__(self, "transport", Subspace())
        if self.transport not in ("auto", "free", "exact") and not isinstance(self.transport, Subspace):
            raise InputError(f"transport={self.transport!r} is unknown: use 'free', 'subspace' or 'exact'.")
        free = self.transport in ("auto", "free") and self.direction != "forward"
        if self.sketch is not None and not (free and self.sketch > 0):
            raise InputError("sketch takes a positive width, with transport='free' and without direction='forward'.")

    @property
    def name(self) -> str:
        """The method's name."""
        transport = f"subspace {self.transport.rank}" if isinstance(self.transport, Subspace) else self.transport
        readout = "" if self.readout == "linear" else f", {self.readout} readout"
        return f"ACC({transport}{readout}{'' if self.sketch is None else f', sketch {self.sketch}'})"

    def resolved(self, run: Run, *, displacements: bool = False) -> ACC:
        """With the transport that the run and the question call for."""
        if self.transport != "auto":
            return self
        exact = not run.rule.linear or displacements or self.readout == "exact"
        return replace(self, transport="exact" if exact else "free")

    def _values(self, request: Request) -> tuple[Tensor, Params | None]:
        if self.transport == "exact":
            sweep = request.sweep(curved=True, corrected=True)
            return swept(request, readout_of(self.readout), self.direction, sweep)
        return self.read(request, self.products(request).corrected), None

    def read(self, request: Request, products: Float[Tensor, "rows vectors"]) -> Float[Tensor, "rows queries"]:
        """Scores from inner products."""
        return self._readout(request).of_products(request.query, products)

    def _readout(self, request: Request) -> Projected:
        readout = readout_of(self.readout)
        if request.displacements or not isinstance(readout, Projected):
            raise InputError(
                f"Displacements and the exact readout need each example's final displacement, which {self.name} does "
                "not have: use transport='exact', or readout='outputs'."
            )
        return readout

    def products(self, request: Request) -> Products:
        """SGD-IE's and ACC's inner products from one cheap sweep, in the cheaper order."""
        vectors = self._readout(request).vectors(request.query)
        free = not isinstance(self.transport, Subspace)
        if self.direction not in ("auto", "forward", "backward"):
            raise InputError(f"direction={self.direction!r} is unknown: use 'auto', 'forward' or 'backward'.")
        if self.direction == "backward" and not free:
            raise InputError("Subspace transport goes forward: leave direction at 'auto'.")
        alone = self.sketch is not None or height(vectors) == 1
        backward = free and (self.direction == "backward" or (self.direction == "auto" and alone))
        return Products(**request.columns(partial(_products, self, backward), vectors))


def _products(estimator: ACC, backward: bool, request: Request, vectors: Params) -> dict[str, Tensor]:
    correction = Correction(request.trajectory, request.members, request.resources, request.cost)
    if backward:
        found = correction.remainders(vectors, estimator.sketch)
    else:
        transport = estimator.transport
        found = correction.corrected_gradient(vectors, transport if isinstance(transport, Subspace) else None)
    return {"plain": found.plain, "corrected": found.corrected}
