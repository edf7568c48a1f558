"""The true curvature of a batch: J = ∂ḡ/∂θ itself, with or without kinks; and none at all.

J is the derivative of the gradient *as training computes it*, H(Z) if nothing stops gradients. It is taken by whichever
form is correct for the objective (``forms.py``).
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from functools import cached_property, partial
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jvp, vmap

from leaveout._util.trees import Params, each, height, pullback
from leaveout.diff.calls import by_chunks, ones, run, stacked, staged
from leaveout.diff.forms import COUPLED, Form, no_form
from leaveout.diff.operator import Product, StepOperator, check_separable, form_of, in_order, is_single, transposed
from leaveout.errors import UnsupportedError
from leaveout.task.batches import Batch
from leaveout.task.objective import Objective
from leaveout.task.rewrites.elementary import Elementary
from leaveout.task.rewrites.folding import Folded
from leaveout.task.rewrites.kinks import inverse_widths
from leaveout.task.rewrites.missing_rules import Passing, quiet_loops
from leaveout.task.training_batch import Picked, Window, parts_of, size_of


class ByVector(StepOperator):
    """An operator made of functions of one vector, which are applied to stacks of them."""

    @classmethod
    @abstractmethod
    def label(cls, form: Form | None) -> str:
        """Name the curvature, with its form if it has one: traces are stored under this name."""

    @classmethod
    @abstractmethod
    def pulled(
        cls, objective: Objective, params: Params, batch: Batch, vectors: Params
    ) -> tuple[Params, tuple[Params, Tensor]]:
        """Compute ḡ, and Cᵀ·u and ⟨u, g(z)⟩/|Z| for every vector u."""

    @classmethod
    @abstractmethod
    def pushed(
        cls, objective: Objective, params: Params, batch: Batch, vectors: Params, weights: Tensor, added: Tensor
    ) -> tuple[Params, Params]:
        """Compute ḡ, and C(w)·v + (1/|Z|) Σ ẇ_z g(z) for every row (v, w, ẇ)."""

    @classmethod
    @abstractmethod
    def of_example(cls, objective: Objective, params: Params, example: Batch, vector: Params) -> tuple[Params, Params]:
        """Compute g(z) and C(z)·v of one example."""

    def _for_batch(self) -> tuple[Objective, Params]:
        """Return the objective and the parameters for products with the batch."""
        return self.objective, self.params

    def _for_examples(self) -> tuple[Objective, Params]:
        """Return the objective and the parameters for products with single examples."""
        return self.objective, self.params

    def pull(self, vectors: Params) -> Product:
        """Compute Cᵀ·u and ⟨u, g(z)⟩/|Z| for every vector u."""
        objective, params = self._for_batch()
        name, function = f"pull {self.label(objective.abilities.vectors)}", partial(self.pulled, objective)
        value, (curved, reads) = by_chunks(objective, name, function, (params, self.batch), (vectors,))
        return Product(curved, reads, value)

    def push(
        self, vectors: Params, weights: Float[Tensor, "vectors batch"], added: Float[Tensor, "vectors batch"]
    ) -> tuple[Params, Params | None]:
        """Compute C(w)·v + (1/|Z|) Σ ẇ_z g(z) for every row (v, w, ẇ), and ḡ."""
        objective, params = self._for_batch()
        name, function = f"push {self.label(objective.abilities.changes)}", partial(self.pushed, objective)
        stacks = (vectors, weights, added)
        value, changes = by_chunks(objective, name, function, (params, self.batch), stacks)
        return changes, value

    def example_products(self, examples: Batch, vectors: Params) -> tuple[Params, Params]:
        """Compute g(z) and C(z)·v for every example, each with a vector of its own, or all with one."""
        return self._of_examples(*self._for_examples(), examples, vectors)

    def _of_examples(
        self, objective: Objective, params: Params, examples: Batch, vectors: Params
    ) -> tuple[Params, Params]:
        check_separable(objective, examples)
        shared = is_single(vectors, params)
        if isinstance(examples, Picked):
            parts = [self._of_examples(objective, params, *group) for group in _groups(examples, vectors, shared)]
            return in_order([a for a, _ in parts], examples.order), in_order([b for _, b in parts], examples.order)

        def products(p: Params, v: Params, b: Batch) -> tuple[tuple, tuple[Params, Params]]:
            def one(example: Batch, vector: Params) -> tuple[Params, Params]:
                return self.of_example(objective, p, example, vector)

            return (), objective.execution.over(one, (0, None) if shared else 0)(b, v)

        given, many = ((params, vectors), (examples,)) if shared else ((params,), (vectors, examples))
        name = f"example_products {self.label(objective.abilities.example)} {shared}"
        return by_chunks(objective, name, products, given, many)[1]


class Hessian(ByVector):
    """J = ∂ḡ/∂θ: SGD-IE, ACC."""

    @classmethod
    def label(cls, form: Form | None) -> str:
        """Name it with its form."""
        return f"hessian {form.name if form else None}"

    def pull(self, vectors: Params) -> Product:
        """Compute Jᵀ·u and ⟨u, g(z)⟩/|Z| for every vector u; one by one, they may do without the gradient."""
        objective, params = self._for_batch()
        if height(vectors) > 1:
            apart = self.objective.execution.chunks.threads and self._each_apart(objective, params, vectors)
            return apart or super().pull(vectors)
        form = form_of(objective, objective.abilities.vector)
        name, function = f"pull one {form.name}", partial(_pulled_one, objective, form)
        *value, curved, reads = run(objective, name, function, params, self.batch, each(lambda t: t[0], vectors))
        return Product(each(lambda t: t[None], curved), reads[None], value[0] if value else None)

    def _each_apart(self, objective: Objective, params: Params, vectors: Params) -> Product | None:
        """Do the same one vector per thread; None if there is no trace.

        The forward pass and the gradients of all activations do not depend on the vector and are computed once. For
        large models this is faster than all vectors at once, whose activations do not fit into the cache.
        """
        form = form_of(objective, objective.abilities.vector)
        first, function = each(lambda t: t[0], vectors), partial(_pulled_one, objective, form)
        along = staged(objective, f"pull one {form.name}", function, (params, self.batch), (first,))
        if not along:
            return None
        values: list[Params] = []

        def one(row: int) -> tuple[Params, Tensor]:
            *value, curved, reads = along(each(lambda t: t[row], vectors))
            values[:] = values or value
            return curved, reads

        curved, reads = stacked(one, height(vectors), self.objective.execution.chunks.threads or 1)
        return Product(curved, reads, values[0] if values else None)

    @classmethod
    def pulled(
        cls, objective: Objective, params: Params, batch: Batch, vectors: Params
    ) -> tuple[Params, tuple[Params, Tensor]]:
        """Compute ḡ, and Jᵀ·u and ⟨u, g(z)⟩/|Z| for every vector u."""
        form, units = form_of(objective, objective.abilities.vectors), ones(params, batch)
        if form is Form.REVERSE_REVERSE:  # one VJP gives both
            value, pull = pullback(
                lambda q, w: objective.gradient({**params, **q}, w, batch), objective.variables(params), units
            )
            return value, objective.execution.over(pull)(vectors)
        if form is Form.FORWARD_REVERSE:
            value = objective.gradient(params, units, batch)
            return value, objective.execution.over(
                lambda vector: _along_gradient(objective, params, batch, vector)[1:]
            )(vectors)
        value = objective.gradient(params, units, batch)
        return value, objective.execution.over(transposed(objective, params, batch))(vectors)

    @classmethod
    def pushed(
        cls, objective: Objective, params: Params, batch: Batch, vectors: Params, weights: Tensor, added: Tensor
    ) -> tuple[Params, Params]:
        """Compute ḡ, and J(w)·v + (1/|Z|) Σ ẇ_z g(z) for every row (v, w, ẇ)."""
        form = form_of(objective, objective.abilities.changes)

        def slope(q: Params, w: Tensor) -> Params:
            return objective.gradient({**params, **q}, w, batch)

        def one(vector: Params, w: Tensor, change: Tensor) -> Params:
            if form is Form.REVERSE_REVERSE and objective.coupled:  # neither symmetric nor linear in the weights
                here, pull = pullback(slope, objective.variables(params), w)
                return pullback(pull, each(torch.zeros_like, here))[1]((vector, change))[0]
            if form is Form.REVERSE_REVERSE:
                _, pull = pullback(lambda q: slope(q, w), objective.variables(params))
                return each(torch.add, pull(vector)[0], slope(objective.variables(params), change))
            with Passing() if form is Form.THROUGH else nullcontext():
                return jvp(slope, (objective.variables(params), w), (vector, change))[1]

        return slope(objective.variables(params), ones(params, batch)), objective.execution.over(one)(
            vectors, weights, added
        )

    @classmethod
    def of_example(cls, objective: Objective, params: Params, example: Batch, vector: Params) -> tuple[Params, Params]:
        """Compute g(z) and J(z)·v: the value of the gradient's derivative is the gradient, so one pass gives both."""
        form = form_of(objective, objective.abilities.example)

        def slope(q: Params) -> Params:
            return grad(lambda r: objective.example_loss({**params, **r}, example))(q)

        if form is Form.REVERSE_REVERSE:
            value, pull = pullback(slope, objective.variables(params))
            return value, pull(vector)[0]
        with Passing() if form is Form.THROUGH else nullcontext():
            both = jvp(slope, (objective.variables(params),), (vector,))
        return both[0], both[1]


class HessianByExample(Hessian):
    """The Hessian whose product with one vector comes with per-example gradients, if both can be computed at once."""

    def pull(self, vectors: Params) -> Product:
        """Compute Jᵀ·u and ⟨u, g(z)⟩/|Z| for every vector u; for a single one, every g(z)/|Z| as well."""
        together = self.objective.abilities.together and self.separable and not isinstance(self.batch, Window)
        # For images, per-example kernels would take longer than a separate pass.
        if height(vectors) > 1 or not together or self.objective.execution.images:
            return super().pull(vectors)
        curved, reads, shares = pull_by_example(self.objective, self.params, self.batch, each(lambda t: t[0], vectors))
        return Product(each(lambda t: t[None], curved), reads[None], None, shares)


class KinkedHessian(Hessian):
    """The Hessian in which kinks (ReLU and the like) have the curvature that crossing them causes on average.

    Gradients are the same. The widths of the bumps are those of the whole batch, even for single examples.
    """

    leaps: ClassVar[bool] = True

    def shifts(self, added: Float[Tensor, "vectors batch"]) -> tuple[Params, Params | None]:
        """Compute (1/|Z|) Σ ẇ_z g(z) for every row of changes, without kinks."""
        return Hessian(self.objective, self.params, self.batch).shifts(added)

    def _for_batch(self) -> tuple[Objective, Params]:
        if isinstance(self.batch, Window):  # each micro-batch would have widths of its own
            return self._for_examples()
        return self.objective.in_mode(kinks=True), self.params

    def _for_examples(self) -> tuple[Objective, Params]:
        return self.objective.in_mode(kinks=True), {**self.params, **self._widths}

    @cached_property
    def _widths(self) -> Params:
        return kink_widths(self.objective, self.params, self.batch)


class Flat(StepOperator):
    """No curvature: only the derivative in the weights."""

    def pull(self, vectors: Params) -> Product:
        """Return zero, and ⟨u, g(z)⟩/|Z| for every vector u."""
        return Product(each(torch.zeros_like, vectors), *self.reads(vectors))

    def push(
        self, vectors: Params, weights: Float[Tensor, "vectors batch"], added: Float[Tensor, "vectors batch"]
    ) -> tuple[Params, Params | None]:
        """Compute (1/|Z|) Σ ẇ_z g(z) for every row of changes."""
        if not self.separable:
            still = each(torch.zeros_like, vectors)
            return Hessian(self.objective, self.params, self.batch).push(still, torch.ones_like(weights), added)
        gradients = self.example_gradients(self.batch)
        return each(lambda t: torch.tensordot(added, t, 1).div_(len(t)), gradients), None

    def example_products(self, examples: Batch, vectors: Params) -> tuple[Params, Params]:  # noqa: ARG002
        """Compute g(z), and zero."""
        gradients = self.example_gradients(examples)
        return gradients, each(torch.zeros_like, gradients)


def check_symmetric(objective: Objective, kind: type[StepOperator] = Hessian) -> None:
    """Refuse stop-gradients if a product with J = ∂ḡ/∂θ would have to stand in for one with its transpose."""
    if issubclass(kind, Hessian) and not objective.abilities.symmetric:
        if objective.abilities.reason == COUPLED:
            raise no_form(COUPLED)
        raise UnsupportedError(
            f"{objective.abilities.reason}, so that the derivative of the gradient is not a symmetric matrix, which "
            "this method takes it for: use SGDIE(), ACC(transport='exact') or Replay().",
            code="curvature-not-symmetric",
        )


def kink_widths(objective: Objective, params: Params, batch: Batch) -> Params:
    """Compute 1/h of every function with kinks over the whole batch, by name, to be passed with the parameters."""
    return run(objective, "kink_widths", lambda p, b: inverse_widths(objective.outputs, p, parts_of(b)), params, batch)


def pull_by_example(
    objective: Objective, params: Params, batch: Batch, vector: Params
) -> tuple[Params, Float[Tensor, " batch"], Params]:
    """Compute Jᵀ·u, ⟨u, g(z)⟩/|Z| and g(z)/|Z| for one vector u and every example z of a batch.

    The losses' derivatives along u are linear in u. If each example is given its own copy of u, the gradient of their
    sum with respect to these copies is each example's gradient. It takes one more matrix product per layer than Jᵀ·u.
    """
    size = size_of(batch)

    def products(p: Params, b: Batch, v: Params) -> tuple[Params, Tensor, Params]:
        def along(q: Params, stack: Params) -> tuple[Tensor, Tensor]:
            def one(example: Batch, copy: Params) -> Tensor:
                return jvp(lambda r: objective.example_loss({**p, **r}, example), (q,), (copy,))[1]

            slopes = vmap(one)(b, stack) / size
            return slopes.sum(), slopes

        stack = each(lambda t: t.expand(size, *t.shape), v)
        with Elementary(), quiet_loops():
            (curved, gradients), slopes = grad(along, (0, 1), has_aux=True)(objective.variables(p), stack)
        return curved, slopes, each(Tensor.contiguous, gradients)

    return run(objective, "pull_by_example", products, params, batch, vector)


def _pulled_one(objective: Objective, form: Form, params: Params, batch: Batch, vector: Params) -> tuple:
    """Compute Jᵀ·u and ⟨u, g(z)⟩/|Z| by a form; a form that also computes ḡ returns it first."""
    if form is Form.REVERSE_FORWARD:  # neither the gradient nor any per-example gradient is formed
        return (_coupled_slope if objective.coupled else _slope)(objective, params, batch, vector)
    if form is Form.FORWARD_REVERSE:
        return _along_gradient(objective, params, batch, vector)
    units = ones(params, batch)
    if form is Form.REVERSE_REVERSE:
        value, pull = pullback(
            lambda q, w: objective.gradient({**params, **q}, w, batch), objective.variables(params), units
        )
        return (value, *pull(vector))
    return (objective.gradient(params, units, batch), *transposed(objective, params, batch)(vector))


def _slope(objective: Objective, params: Params, batch: Batch, vector: Params) -> tuple[Params, Tensor]:
    """Compute the gradient of the losses' derivative along v, and that derivative, both divided by |Z|."""

    def along(q: Params) -> tuple[Tensor, Tensor]:
        slope = jvp(lambda r: objective.losses({**params, **r}, batch), (q,), (vector,))[1] / size_of(batch)
        return slope.sum(), slope

    with Elementary():
        return grad(along, has_aux=True)(objective.variables(params))


def _coupled_slope(objective: Objective, params: Params, batch: Batch, vector: Params) -> tuple[Params, Tensor]:
    """Compute the same for examples that depend on each other.

    It is the gradient, with respect to parameters, buffers and weights, of the loss's derivative along v plus the inner
    product of v with the buffers' new values.
    """
    moving = {name: vector[name] for name in objective.chosen}

    def along(q: Params, weights: Tensor) -> Tensor:
        def loss(r: Params) -> tuple[Tensor, Params]:
            return objective.value({**params, **q, **r}, weights, batch)

        chosen = {name: q[name] for name in moving}
        _, slope, moved = jvp(loss, (chosen,), (moving,), has_aux=True)  # type: ignore[misc]
        return slope + sum((vector[name] * value).sum() for name, value in moved.items())

    with Elementary():
        return grad(along, (0, 1))(objective.variables(params), ones(params, batch))


def _along_gradient(
    objective: Objective, params: Params, batch: Batch, vector: Params
) -> tuple[Params, Params, Tensor]:
    """Compute ḡ, its derivative along v, and that of each example's loss, divided by |Z|."""
    size = size_of(batch)

    def mean(q: Params) -> tuple[Tensor, Tensor]:
        with Folded():
            losses = objective.losses({**params, **q}, batch)
        return losses.sum() / size, losses

    values, changes = jvp(grad(mean, has_aux=True), (objective.variables(params),), (vector,))  # type: ignore[misc]
    return values[0], changes[0], changes[1] / size


def _groups(picked: Picked, vectors: Params, shared: bool) -> list[tuple[Batch, Params]]:
    """Return each group with its vectors."""
    if shared:
        return [(group, vectors) for group in picked.groups]
    places = torch.argsort(picked.order).split([size_of(group) for group in picked.groups])
    return [(group, each(lambda t, at=at: t[at], vectors)) for group, at in zip(picked.groups, places, strict=True)]
