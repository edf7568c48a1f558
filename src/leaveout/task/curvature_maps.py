"""The linear maps v ↦ C·v at one state: the Hessian, and the Gauss-Newton and Fisher matrices that may replace it.

Each has the product of a batch, the product with separate example weights for every row, and the product of one
example; all return the gradient too, which the same pass computes. ``leaveout.task.derivatives`` applies them to many
vectors at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

from leaveout._util.trees import Params, each, inner_rows, pullback
from leaveout.task.batches import Batch, map_leaves
from leaveout.task.calls import form_of, no_form, ones
from leaveout.task.forms import Form
from leaveout.task.rewrites.elementary import Elementary
from leaveout.task.rewrites.folding import Folded
from leaveout.task.rewrites.missing_rules import Passing
from leaveout.task.training_batch import TrainingBatch, joined, size_of

if TYPE_CHECKING:
    from leaveout.task.task import Task


class CurvatureMap(ABC):
    """The derivative J of the batch gradient ḡ, or a substitute for it, applied to vectors."""

    @abstractmethod
    def name(self, form: Form | None) -> str:
        """Name the map, with its form if it has one: traces are stored under this name."""

    @abstractmethod
    def products(self, task: Task, params: Params, batch: Batch, vectors: Params) -> tuple[Params, Any]:
        """Compute ḡ, and Cᵀ·u and ⟨u, g(z)⟩/|Z| for every vector u."""

    @abstractmethod
    def changes(
        self, task: Task, params: Params, batch: Batch, vectors: Params, weights: Tensor, added: Tensor
    ) -> tuple[Params, Params]:
        """Compute ḡ, and C(w)·v + (1/|Z|) Σ ẇ_z g(z) for every row (v, w, ẇ)."""

    @abstractmethod
    def example(self, task: Task, params: Params, example: Batch, vector: Params) -> tuple[Params, Params]:
        """Compute g(z) and C(z)·v of one example."""


class Hessian(CurvatureMap):
    """J = ∂ḡ/∂θ itself, by whichever form is correct for the task; H(Z) if nothing stops gradients."""

    def name(self, form: Form | None) -> str:
        """Name it with its form."""
        return f"hessian {form.name if form else None}"

    def products(self, task: Task, params: Params, batch: Batch, vectors: Params) -> tuple[Params, Any]:
        """Compute ḡ, and Jᵀ·u and ⟨u, g(z)⟩/|Z| for every vector u."""
        form = form_of(task, task.abilities.vectors)
        if form is Form.REVERSE_REVERSE:  # one VJP gives both
            value, pull = pullback(
                lambda q, w: task.gradient({**params, **q}, w, batch), task.variables(params), ones(params, batch)
            )
            return value, task.over(pull)(vectors)
        if form is Form.FORWARD_REVERSE:
            value = task.gradient(params, ones(params, batch), batch)
            return value, task.over(lambda vector: pushed(task, params, batch, vector)[1:])(vectors)
        value = task.gradient(params, ones(params, batch), batch)
        return value, task.over(transposed(task, params, batch))(vectors)

    def changes(
        self, task: Task, params: Params, batch: Batch, vectors: Params, weights: Tensor, added: Tensor
    ) -> tuple[Params, Params]:
        """Compute ḡ, and J(w)·v + (1/|Z|) Σ ẇ_z g(z) for every row (v, w, ẇ)."""
        form = form_of(task, task.abilities.changes)

        def slope(q: Params, w: Tensor) -> Params:
            return task.gradient({**params, **q}, w, batch)

        def one(vector: Params, w: Tensor, change: Tensor) -> Params:
            if form is Form.REVERSE_REVERSE and task.coupled:  # neither symmetric nor linear in the weights
                here, pull = pullback(slope, task.variables(params), w)
                return pullback(pull, each(torch.zeros_like, here))[1]((vector, change))[0]
            if form is Form.REVERSE_REVERSE:
                _, pull = pullback(lambda q: slope(q, w), task.variables(params))
                return each(torch.add, pull(vector)[0], slope(task.variables(params), change))
            with Passing() if form is Form.THROUGH else nullcontext():
                return jvp(slope, (task.variables(params), w), (vector, change))[1]

        return slope(task.variables(params), ones(params, batch)), task.over(one)(vectors, weights, added)

    def example(self, task: Task, params: Params, example: Batch, vector: Params) -> tuple[Params, Params]:
        """Compute g(z) and J(z)·v: the value of the gradient's derivative is the gradient, so one pass gives both."""
        form = form_of(task, task.abilities.example)

        def slope(q: Params) -> Params:
            return grad(lambda r: task.example_loss({**params, **r}, example))(q)

        if form is Form.REVERSE_REVERSE:
            value, pull = pullback(slope, task.variables(params))
            return value, pull(vector)[0]
        with Passing() if form is Form.THROUGH else nullcontext():
            both = jvp(slope, (task.variables(params),), (vector,))
        return both[0], both[1]


@dataclass(frozen=True)
class Outer(CurvatureMap):
    """C = (1/|Z|) Σ Jᵀ A J. The L2 term's curvature is known, and added directly.

    Gauss-Newton: J the Jacobian of z's outputs, A the Hessian of the loss in them. Fisher: J the gradient of z's loss,
    A = 1.
    """

    fisher: bool

    def name(self, form: Form | None) -> str:  # noqa: ARG002 - it has one form only
        """Name the matrix."""
        return "fisher" if self.fisher else "gauss_newton"

    def products(self, task: Task, params: Params, batch: Batch, vectors: Params) -> tuple[Params, Any]:
        """Compute ḡ, and C·v and ⟨v, g(z)⟩/|Z| for every vector v."""
        value, one = self._at(task, params, batch)
        return value, task.over(one)(vectors)

    def changes(
        self, task: Task, params: Params, batch: Batch, vectors: Params, weights: Tensor, added: Tensor
    ) -> tuple[Params, Params]:
        """Compute ḡ, and C(w)·v + (1/|Z|) Σ ẇ_z g(z) for every row (v, w, ẇ)."""
        value, one = self._at(task, params, batch)
        return value, task.over(lambda *row: one(*row)[0])(vectors, weights, added)

    def example(self, task: Task, params: Params, example: Batch, vector: Params) -> tuple[Params, Params]:
        """Compute g(z) and C(z)·v."""
        value, one = self._at(task, params, map_leaves(lambda leaf: leaf.unsqueeze(0), example))
        return value, one(vector)[0]

    def _at(self, task: Task, params: Params, batch: Batch) -> tuple[Params, Callable[..., tuple[Params, Tensor]]]:
        """Return ḡ, and the function v ↦ (C·v, ⟨v, g(z)⟩/|Z|).

        Given weights w and their change ẇ too, that function returns C(Z; w)·v + (1/|Z|) Σ ẇ_z g(z) in place of C·v.
        Outputs may have any shape; only the losses are known to have one value per example.
        """
        if not task.abilities.outer:
            raise no_form(task.abilities.reason)
        here, size, batch = task.variables(params), size_of(batch), joined(batch)
        scale = batch.scale if isinstance(batch, TrainingBatch) and isinstance(batch.scale, Tensor) else 1.0

        def both(q: Params) -> tuple[Tensor, Any]:
            outputs, targets = task.outputs({**params, **q}, batch)
            return (task.output_losses(outputs, targets) * scale if self.fisher else outputs), targets

        outputs, pull, targets = vjp(both, here, has_aux=True)  # type: ignore[misc]
        units = ones(params, batch)

        def losses(at: Tensor) -> Tensor:
            return at if self.fisher else task.output_losses(at, targets) * scale

        def slopes(at: Tensor, weights: Tensor) -> Tensor:
            return grad(lambda o: (weights * losses(o)).sum())(at)

        def one(vector: Params, weights: Tensor = units, added: Tensor | None = None) -> tuple[Params, Tensor]:
            change = _along(task, lambda q: both(q)[0], here, vector)
            bent = weights * change if self.fisher else _along(task, lambda o: slopes(o, weights), outputs, change)
            curved = each(lambda c, v: c + task.l2 * weights.mean() * v, pull(bent / size)[0], vector)
            if added is not None:
                gradient = pull(slopes(outputs, added) / size)[0]
                curved = each(lambda c, g, q: c + g + task.l2 * added.mean() * q, curved, gradient, here)
            decay = task.l2 * inner_rows(*({n: t[None] for n, t in side.items()} for side in (here, vector)))
            return curved, (_along(task, losses, outputs, change) + decay) / size

        return each(lambda g, q: g + task.l2 * q, pull(slopes(outputs, units) / size)[0], here), one


HESSIAN = Hessian()
GAUSS_NEWTON = Outer(fisher=False)
FISHER = Outer(fisher=True)


def pushed(task: Task, params: Params, batch: Batch, vector: Params) -> tuple[Params, Params, Tensor]:
    """Compute ḡ, its derivative along v, and that of each example's loss, divided by |Z|."""
    size = size_of(batch)

    def mean(q: Params) -> tuple[Tensor, Tensor]:
        with Folded():
            losses = task.losses({**params, **q}, batch)
        return losses.sum() / size, losses

    values, changes = jvp(grad(mean, has_aux=True), (task.variables(params),), (vector,))  # type: ignore[misc]
    return values[0], changes[0], changes[1] / size


def transposed(task: Task, params: Params, batch: Batch) -> Callable[[Params], tuple[Params, Tensor]]:
    """Return u ↦ Jᵀ·u and ⟨u, g(z)⟩/|Z|, as the transpose of the derivative of ḡ with gradients stopped once.

    That is its derivative in the weights too: a stopped value may depend on them, by statistics of the batch.
    """
    here, units = task.variables(params), ones(params, batch)

    def push(vector: Params, change: Tensor) -> Params:
        with Elementary(), Passing():
            return jvp(lambda q, w: task.gradient({**params, **q}, w, batch), (here, units), (vector, change))[1]

    return pullback(push, each(torch.zeros_like, here), torch.zeros_like(units))[1]


def _along(task: Task, function: Callable, at: Any, vector: Any) -> Any:
    """Compute the JVP of a function; by two VJPs if there is no forward mode."""
    if task.abilities.forward:
        return jvp(function, (at,), (vector,))[1]
    value, pull = pullback(function, at)
    return pullback(lambda cotangent: pull(cotangent)[0], torch.zeros_like(value))[1](vector)[0]
