"""Influence functions: treat the final point as a minimum, and ignore the path that led there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout._util.trees import PARAM, Params, add_rows, each, gather_sums
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.diff.hessian import Hessian, check_symmetric
from leaveout.diff.operator import example_gradients, reads
from leaveout.errors import InputError, UnsupportedError, check_seed
from leaveout.estimators.base import Estimator, titled
from leaveout.estimators.checkpoints import example_blocks
from leaveout.estimators.readout import Projected, readout_of
from leaveout.estimators.request import Request
from leaveout.estimators.solvers import Apply, conjugate_gradients, direct, lissa
from leaveout.sweep import budget
from leaveout.sweep.free_transport import Layout
from leaveout.task.counted import per_count
from leaveout.task.execution import Chunks
from leaveout.task.objective import Objective
from leaveout.trajectory.left_out import LeftOut

HELD = 14
"""How many vectors a solver holds per right-hand side."""

SOLVERS = ("cg", "direct", "lissa")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class InfluenceFunction(Estimator):
    """δ_k = (1/n) (H + λI)⁻¹ g(z_k, θ_N), with H the mean Hessian of all n training examples at the final parameters.

    Koh and Liang (2017). It describes the minimum of the training loss, from which the example is removed without
    reweighting the others; exact to first order there, whatever the optimizer. It does not take into account that a
    run may have stopped earlier, or found one of many minima. Where examples count differently in the training loss
    (class weights, unmasked tokens), g and H have these counts, relative to their mean. Weight decay that is added to
    the gradient (SGD, Adam) is part of H; decoupled decay (AdamW) is not part of the minimised loss.

    Cost: ``"cg"``: as many products with H, of n examples each, as it needs per query vector; ``"direct"``: as many as
    there are parameters (again for every shard of rows, if displacements are requested); ``"lissa"``: ``steps``
    products with a batch.

    Args:
        solver: ``"cg"`` (conjugate gradients), ``"direct"`` (the whole matrix: small models) or ``"lissa"``
            (the stochastic recursion of Agarwal et al. 2017, with a scale found by power iteration).
        damping: λ, added to the Hessian; needed if it is not positive definite, as for most networks.
        steps: the maximum number of products for cg, and their number for lissa.
        readout: ``"linear"``, ``"outputs"`` or ``"exact"``.
        layers: only these parameters move: names or patterns such as ``"head.*"``.
        seed: for lissa's samples.
    """

    solver: str = "cg"
    damping: float = 0.0
    steps: int = 1000
    readout: str = "linear"
    layers: str | Sequence[str] | None = None
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        readout_of(self.readout)
        if self.solver not in SOLVERS:
            raise InputError(
                f"solver={self.solver!r} is unknown: use 'cg', 'direct' or 'lissa'.", code="solver-unknown"
            )
        if self.damping < 0 or self.steps < 2:
            raise InputError(
                f"damping={self.damping} must not be negative, and steps={self.steps} at least 2.",
                code="solver-option-out-of-range",
            )
        check_seed(self.seed, 0, 2**63 - 1)

    @property
    def name(self) -> str:
        """The method's name."""
        damping = f"damping {self.damping:g}" if self.damping else None
        return titled(
            "Influence function",
            {"solver": self.solver, "damping": damping, "readout": self.readout, "layers": self.layers},
        )

    def values(self, request: Request) -> tuple[Tensor, Params | None]:
        """Return the scores, and the displacements if requested."""
        readout, width = readout_of(self.readout), budget.param_bytes(request.trajectory)
        request.trajectory.check_steps()
        if self.solver == "direct":
            like = next(iter(request.trajectory.final()[PARAM].values()))
            request.resources.check(
                5 * width**2 // like.element_size(), "the whole Hessian, its factor and one product"
            )

        def solved(left_out: LeftOut, vectors: Params, resources: Resources, cost: Cost) -> Tensor:
            minimum = _Minimum(replace(request, left_out=left_out, resources=resources, cost=cost), self)
            return minimum.products(minimum.solve(vectors))

        def moved(shard: Request) -> tuple[Tensor, Params | None]:
            minimum = _Minimum(shard, self)
            displacements = minimum.solve(minimum.gradients(shard.left_out))
            values = readout.of_displacements(shard.query, displacements)
            return values, displacements if shard.displacements else None

        if isinstance(readout, Projected) and not request.displacements:
            return request.columns(solved, readout, vector_bytes=HELD * width)["products"], None
        return request.rows(moved, HELD * width, "solving")


class _Minimum:
    """The training loss around the final parameters."""

    def __init__(self, request: Request, method: InfluenceFunction) -> None:
        self.request, self.method = request, method
        trajectory = request.trajectory
        check_symmetric(trajectory.objective)
        self.params, self.batch_size = trajectory.final_whole()[PARAM], len(trajectory.run.record(0).ids)
        self.task = per_count(trajectory.task, self.params, self.batch_size)
        self.layout = Layout(trajectory.rule, trajectory.final()[PARAM])
        self.chunk = 2 * budget.product_bytes(trajectory)
        hypers = trajectory.run.record(len(trajectory) - 1).hypers
        rule = trajectory.rule
        self.rule = rule.beside(self.params, trajectory.objective.names)
        if any(hyper.get("maximize") for hyper in hypers):
            raise UnsupportedError(
                "Influence functions are taken at a minimum of the loss, and this run maximised it: use SGDIE() or "
                "Replay().",
                code="not-a-minimum",
            )
        decay = {name: rule.definition.coupled_decay(hypers[group]) for name, group in rule.groups.items()}
        like = next(iter(self.params.values()))
        self.diagonal = self.layout.spread(decay, like) + method.damping

    def solve(self, stack: Params) -> Params:
        """Apply (H + λI)⁻¹ to every vector of a stack."""
        right = self.layout.flatten(stack)
        if self.method.solver == "direct":
            chunk = self.request.resources.chunk(self.chunk, right.shape[1])
            solved = direct(self._hessian, right, chunk)
        elif self.method.solver == "cg":
            tolerance = TOLERANCE.get(right.dtype, 1e-4)
            solved = conjugate_gradients(self._hessian, right, self.method.steps, tolerance)
        else:
            solved = lissa(self._samples(self.method.seed), right, self.method.steps, self._scale(right))
        return self.layout.unflatten(solved)

    def products(self, vectors: Params) -> Float[Tensor, "rows vectors"]:
        """Compute ⟨v, g(z)⟩/n for every row and vector."""
        left_out = self.request.left_out
        total = next(iter(vectors.values())).new_zeros((len(left_out), len(next(iter(vectors.values())))))
        objective = self._chunked(total.shape[1])
        for ids, block in example_blocks(self.request):
            self.request.cost.gradients += 1
            products = reads(objective, self.params, block, vectors)[0]
            row, position = left_out.pairs(ids)
            add_rows(total, row, products[:, position].T, alpha=len(ids) / self.task.size)
        return total

    def gradients(self, left_out: LeftOut) -> Params:
        """Compute (1/n) Σ g(z) over each row's examples."""
        owner = torch.arange(len(left_out)).repeat_interleave(left_out.lengths)
        total = each(lambda t: t.new_zeros((len(left_out), *t.shape)), self.task.objective.variables(self.params))
        for ids, rows in zip(left_out.examples.split(self.batch_size), owner.split(self.batch_size), strict=True):
            self.request.cost.gradients += 1
            stack = example_gradients(self.task.objective, self.params, self.task.read(ids.tolist()))
            total = each(torch.add, total, gather_sums(stack, rows, len(left_out)))
        return each(lambda t: t / self.task.size, total)

    def _hessian(self, rows: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Apply H + λI over all training examples."""
        total = self.diagonal * rows
        for start in range(0, self.task.size, self.batch_size):
            ids = range(start, min(start + self.batch_size, self.task.size))
            total = total + self._product(list(ids), rows) * (len(ids) / self.task.size)
        return total

    def _product(self, ids: list[int], rows: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        batch, vectors = self.task.read(ids), self.layout.unflatten(rows)
        self.request.cost.hvps += len(rows)
        curved = Hessian(self._chunked(len(rows)), self.params, batch).pull(vectors).curved
        return self.layout.flatten(curved) + self.layout.flatten(self.rule.bent(self.params, vectors))

    def _chunked(self, count: int) -> Objective:
        """Return the objective for products with so many vectors."""
        return self.task.objective.chunked(Chunks(self.request.resources.chunk(self.chunk, count)))

    def _damped(self, ids: list[int], rows: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        return self._product(ids, rows) + self.diagonal * rows

    def _samples(self, seed: int) -> Iterator[Apply]:
        """Yield the products with H(Z) + λI of seeded random batches Z."""
        order = torch.Generator().manual_seed(seed)
        while True:
            ids = torch.randint(self.task.size, (self.batch_size,), generator=order).tolist()
            yield partial(self._damped, ids)

    def _scale(self, like: Tensor, batches: int = 8, rounds: int = 10) -> float:
        """Bound the largest eigenvalue of some random batches from above, by power iteration."""
        start = torch.randn(like.shape[1], generator=torch.Generator().manual_seed(self.method.seed)).to(like)
        largest = 0.0
        samples = self._samples(self.method.seed + 1)
        for _ in range(batches):
            sample, x = next(samples), start[None]
            for _ in range(rounds):
                x = sample(x / x.norm())
            largest = max(largest, float(x.norm()))
        return 1.5 * largest
