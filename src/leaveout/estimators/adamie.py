"""Adam-IE: LESS's cosine between the query gradient and Adam's update for an example's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout._util.trees import PARAM, Params, height
from leaveout.diff.hessian import Hessian
from leaveout.diff.operator import example_gradients
from leaveout.errors import InputError, UnsupportedError
from leaveout.estimators.base import Estimator, titled
from leaveout.estimators.checkpoints import Checkpoint, checkpoints
from leaveout.estimators.request import Request
from leaveout.sweep import budget
from leaveout.sweep.free_transport import Layout


@dataclass(frozen=True)
class AdamIE(Estimator):
    """Σ_c η_c cos(∇L(query, θ_c), Γ_c(g(z_k, θ_c))) with Γ(g) = m̂/(√v̂ + ε), m and v the moments after a step along g.

    The formulation of LESS (Xia et al. 2024): over the states at the ends of epochs, with the epoch's mean learning
    rate η_c and the recorded moments. A cosine, not a change of the loss: it ranks, and its size means little. The
    linearisation of training with Adam is ``SGDIE`` or ``ACC`` on the same run.

    ``acc=True`` reads Γ of the corrected gradient ``g(z_k) + H(z_k)·δ_k``; ``δ_k = Σ (α/|Z|) Γ_c(g(z_k))`` over the
    earlier c is the example's own part of the updates so far, carried without curvature.

    Cost: one gradient of every example per checkpoint; with ``acc`` one HVP of every example as well.

    Args:
        acc: correct the gradients with the examples' own curvature.
        layers: only these parameters count: names or patterns such as ``"head.*"``.
    """

    acc: bool = False
    layers: str | Sequence[str] | None = None

    @property
    def name(self) -> str:
        """The method's name."""
        return titled("ACC-Adam-IE" if self.acc else "Adam-IE", {"layers": self.layers})

    @property
    def unit(self) -> str:
        """The unit of the scores."""
        return "learning rate times cosine"

    def values(self, request: Request) -> tuple[Tensor, Params | None]:
        """Return the scores, and the displacements if requested."""
        self._check(request)
        return request.rows(self._of_rows, 20 * budget.param_bytes(request.trajectory), "checkpoints")

    def _of_rows(self, request: Request) -> tuple[Float[Tensor, "rows queries"], None]:
        task, part = request.trajectory.task, request.left_out
        layout = Layout(request.trajectory.rule, request.trajectory.initial()[PARAM])
        examples = task.read(part.examples.tolist())
        batches = -(-len(part) // len(request.trajectory.run.record(0).ids))
        moved = torch.zeros(())
        total = next(iter(request.trajectory.final()[PARAM].values())).new_zeros((len(part), len(request.query.ids)))
        for number, point in enumerate(checkpoints(request)):
            request.cost.gradients += batches
            if self.acc and number:
                operator = Hessian(task.objective, point.params, examples)
                plain, curved = operator.example_products(examples, layout.unflatten(moved))
                request.cost.hvps += batches
                gradients = layout.flatten(plain)
                readings = gradients + layout.flatten(curved)
            else:
                readings = gradients = layout.flatten(example_gradients(task.objective, point.params, examples))
            rate = layout.spread(point.rate, readings)
            stepped = preconditioned(layout, point, readings) * rate
            for start, vectors in point.vectors():
                columns = total[:, start : start + height(vectors)]
                columns += rate.mean() * cosines(stepped, layout.flatten(vectors))
            moved = moved + layout.spread(point.share, readings) * preconditioned(layout, point, gradients)
        return total, None

    def _check(self, request: Request) -> None:
        rule = request.trajectory.rule
        varied = [name for name in rule.definition.options if name in rule.extras]
        if not rule.definition.adam_moments or varied:
            kind = " with ".join([rule.kind, *varied[:1]])
            raise UnsupportedError(
                f"Adam-IE needs Adam's moments, which a run of {kind} does not have: use SGDIE() or ACC().",
                code="adam-moments-missing",
            )
        if bool((request.left_out.lengths > 1).any()):
            raise InputError(
                "Cosines do not add up, so Adam-IE has no scores of groups: use SGDIE, ACC or Replay.",
                code="groups-not-additive",
            )
        if request.displacements:
            raise InputError(
                "Adam-IE has no displacements, only cosines: use SGDIE or ACC.", code="displacements-not-available"
            )


def preconditioned(
    layout: Layout, point: Checkpoint, gradients: Float[Tensor, "rows width"]
) -> Float[Tensor, "rows width"]:
    """Compute Γ(g) = m̂/(√v̂ + ε), m = β₁m_c + (1−β₁)g and v = β₂v_c + (1−β₂)g² corrected for their start at zero."""
    mean, square = (layout.flatten({n: t[None] for n, t in point.state[s].items()}) for s in ("exp_avg", "exp_avg_sq"))
    of = {key: layout.spread(values, gradients) for key, values in point.adam.items()}
    t = of["step"] + 1
    m = (of["beta1"] * mean + (1 - of["beta1"]) * gradients) / (1 - of["beta1"] ** t)
    v = (of["beta2"] * square + (1 - of["beta2"]) * gradients.square()) / (1 - of["beta2"] ** t)
    return m / (v.sqrt() + of["eps"])


def cosines(left: Float[Tensor, "rows width"], right: Float[Tensor, "queries width"]) -> Float[Tensor, "rows queries"]:
    """Compute the cosine of every row with every query; zero if one of them is zero.

    >>> cosines(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[2.0, 0.0]])).tolist()
    [[0.6000000238418579], [0.0]]
    """
    return torch.nn.functional.normalize(left, dim=1) @ torch.nn.functional.normalize(right, dim=1).T
