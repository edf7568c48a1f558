"""Positive stand-ins for the Hessian, made of first derivatives: the Gauss-Newton and the Fisher matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

from leaveout._util.trees import Params, each, inner_rows, pullback
from leaveout.diff.calls import ones
from leaveout.diff.forms import Form, no_form
from leaveout.diff.hessian import ByVector
from leaveout.task.batches import Batch, map_leaves
from leaveout.task.objective import Objective
from leaveout.task.training_batch import TrainingBatch, joined, size_of


class GaussNewton(ByVector):
    """(1/|Z|) Σ Jᵀ A J with the Jacobian J of the outputs and the Hessian A of the loss in them.

    The Hessian if the model were linear there: positive semidefinite for convex losses; equal to the Hessian for linear
    models. The L2 term's curvature is known, and added directly.
    """

    fisher: ClassVar[bool] = False

    @classmethod
    def label(cls, form: Form | None) -> str:  # noqa: ARG003 - it has one form only
        """Name the matrix."""
        return cls.__name__

    @classmethod
    def pulled(
        cls, objective: Objective, params: Params, batch: Batch, vectors: Params
    ) -> tuple[Params, tuple[Params, Tensor]]:
        """Compute ḡ, and C·v and ⟨v, g(z)⟩/|Z| for every vector v."""
        value, one = cls._at(objective, params, batch)
        return value, objective.execution.over(one)(vectors)

    @classmethod
    def pushed(
        cls, objective: Objective, params: Params, batch: Batch, vectors: Params, weights: Tensor, added: Tensor
    ) -> tuple[Params, Params]:
        """Compute ḡ, and C(w)·v + (1/|Z|) Σ ẇ_z g(z) for every row (v, w, ẇ)."""
        value, one = cls._at(objective, params, batch)
        return value, objective.execution.over(lambda *row: one(*row)[0])(vectors, weights, added)

    @classmethod
    def of_example(cls, objective: Objective, params: Params, example: Batch, vector: Params) -> tuple[Params, Params]:
        """Compute g(z) and C(z)·v."""
        value, one = cls._at(objective, params, map_leaves(lambda leaf: leaf.unsqueeze(0), example))
        return value, one(vector)[0]

    @classmethod
    def _at(
        cls, objective: Objective, params: Params, batch: Batch
    ) -> tuple[Params, Callable[..., tuple[Params, Tensor]]]:
        """Return ḡ, and the function v ↦ (C·v, ⟨v, g(z)⟩/|Z|).

        Given weights w and their change ẇ too, that function returns C(Z; w)·v + (1/|Z|) Σ ẇ_z g(z) in place of C·v.
        Outputs may have any shape; only the losses are known to have one value per example.
        """
        if not objective.abilities.outer:
            raise no_form(objective.abilities.reason)
        here, size, batch = objective.variables(params), size_of(batch), joined(batch)
        scale = batch.scale if isinstance(batch, TrainingBatch) and isinstance(batch.scale, Tensor) else 1.0

        def both(q: Params) -> tuple[Tensor, Any]:
            outputs, targets = objective.outputs({**params, **q}, batch)
            return (objective.output_losses(outputs, targets) * scale if cls.fisher else outputs), targets

        outputs, pull, targets = vjp(both, here, has_aux=True)  # type: ignore[misc]
        units = ones(params, batch)

        def losses(at: Tensor) -> Tensor:
            return at if cls.fisher else objective.output_losses(at, targets) * scale

        def slopes(at: Tensor, weights: Tensor) -> Tensor:
            return grad(lambda o: (weights * losses(o)).sum())(at)

        def one(vector: Params, weights: Tensor = units, added: Tensor | None = None) -> tuple[Params, Tensor]:
            change = _along(objective, lambda q: both(q)[0], here, vector)
            bent = weights * change if cls.fisher else _along(objective, lambda o: slopes(o, weights), outputs, change)
            curved = each(lambda c, v: c + objective.l2 * weights.mean() * v, pull(bent / size)[0], vector)
            if added is not None:
                gradient = pull(slopes(outputs, added) / size)[0]
                curved = each(lambda c, g, q: c + g + objective.l2 * added.mean() * q, curved, gradient, here)
            decay = objective.l2 * inner_rows(*({n: t[None] for n, t in side.items()} for side in (here, vector)))
            return curved, (_along(objective, losses, outputs, change) + decay) / size

        return each(lambda g, q: g + objective.l2 * q, pull(slopes(outputs, units) / size)[0], here), one


class Fisher(GaussNewton):
    """(1/|Z|) Σ g gᵀ with the gradients g of the examples' losses without their L2 term, whose curvature is added."""

    fisher = True


def _along(objective: Objective, function: Callable, at: Any, vector: Any) -> Any:
    """Compute the JVP of a function; by two VJPs if there is no forward mode."""
    if objective.abilities.forward:
        return jvp(function, (at,), (vector,))[1]
    value, pull = pullback(function, at)
    return pullback(lambda cotangent: pull(cotangent)[0], torch.zeros_like(value))[1](vector)[0]
