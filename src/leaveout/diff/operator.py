"""The batch of one recorded step as an operator: its gradient, and products with its curvature or a stand-in for it.

``Z`` is a batch of |Z| examples with losses ℓ(z, θ), g(z) and H(z) their gradients and Hessians, and
``ḡ(w) = (1/|Z|) Σ w_z g(z)``, ``C(w)`` the curvature of the batch with these weights. A *stack* has a first dimension
of its own. An operator computes and returns; it keeps nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import grad, jvp

from leaveout._util.trees import Params, each, inner, pullback, rows
from leaveout.diff.calls import by_chunks, ones, run, stacked, staged
from leaveout.diff.forms import COUPLED, Form, no_form
from leaveout.task.batches import Batch
from leaveout.task.objective import Objective
from leaveout.task.rewrites.elementary import Elementary
from leaveout.task.rewrites.missing_rules import Passing, batched
from leaveout.task.trace.tracer import RARE
from leaveout.task.training_batch import Picked, TrainingBatch, has_shared_draws, size_of, take


class Product(NamedTuple):
    """What one pass over a batch gives for a stack of vectors.

    Attributes:
        curved: Cᵀ·u for every vector u.
        reads: ⟨u, g(z)⟩/|Z| for every vector and example.
        gradient: ḡ, if the pass computes it.
        shares: g(z)/|Z| of every example, if the pass computes them.
    """

    curved: Params
    reads: Float[Tensor, "vectors batch"]
    gradient: Params | None = None
    shares: Params | None = None


class StepOperator(ABC):
    """A curvature C of one batch at one state; subclasses say which, and may be defined anywhere.

    Args:
        objective: what is differentiated, in the mode of the step, and how that is computed.
        params: the parameters and moving buffers before the step.
        batch: the step's batch.
    """

    leaps: ClassVar[bool] = False
    """Whether the curvature stands for leaps of the gradient."""

    def __init__(self, objective: Objective, params: Params, batch: Batch) -> None:
        self.objective, self.params, self.batch = objective, params, batch

    @abstractmethod
    def pull(self, vectors: Params) -> Product:
        """Compute Cᵀ·u and ⟨u, g(z)⟩/|Z| for every vector u."""

    @abstractmethod
    def push(
        self, vectors: Params, weights: Float[Tensor, "vectors batch"], added: Float[Tensor, "vectors batch"]
    ) -> tuple[Params, Params | None]:
        """Compute C(w)·v + (1/|Z|) Σ ẇ_z g(z) for every vector v, with weights w and their change ẇ; and ḡ, if at hand.

        A row that leaves out an example has weight zero there, and −1 as its change: one pass gives both parts.
        """

    @abstractmethod
    def example_products(self, examples: Batch, vectors: Params) -> tuple[Params, Params]:
        """Compute g(z) and C(z)·v for every example, each with a vector of its own, or all with one."""

    def gradient(self) -> Params:
        """Compute ḡ."""
        return gradient(self.objective, self.params, self.batch)

    def example_gradients(self, examples: Batch) -> Params:
        """Compute g(z) for every example."""
        return example_gradients(self.objective, self.params, examples)

    def reads(self, vectors: Params) -> tuple[Float[Tensor, "vectors batch"], Params | None]:
        """Compute ⟨a, g_z⟩/|Z| for every vector a; and ḡ, if at hand."""
        return reads(self.objective, self.params, self.batch, vectors)

    def shifts(self, added: Float[Tensor, "vectors batch"]) -> tuple[Params, Params | None]:
        """Compute (1/|Z|) Σ ẇ_z g(z) for every row of changes ẇ; and ḡ, if at hand."""
        still = {name: t.new_zeros((len(added), *t.shape)) for name, t in self.objective.variables(self.params).items()}
        return self.push(still, torch.ones_like(added), added)

    def shares(self, position: Int[Tensor, " chosen"]) -> Params:
        """Compute g(z)/|Z| for the examples at these positions in the batch."""
        size = size_of(self.batch)
        return each(lambda t: t / size, self.example_gradients(take(self.batch, position)))

    @property
    def separable(self) -> bool:
        """Say whether ḡ is a mean over examples that do not depend on each other."""
        return not self.objective.coupled and not has_shared_draws(self.batch)

    def gradients_with(self, weights: Float[Tensor, "rows batch"]) -> Params:
        """Compute ḡ(w) for every row of weights, even if examples depend on each other."""
        objective, threads = self.objective, self.objective.execution.chunks.threads

        def one(p: Params, b: Batch, w: Tensor) -> Params:
            return objective.gradient(p, w, b, alone=True)

        if threads and (
            traced := staged(objective, "gradient with weights", one, (self.params, self.batch), (weights[0],))
        ):
            return stacked(lambda row: traced(weights[row]), len(weights), threads)

        def every(p: Params, b: Batch, w: Tensor) -> tuple[tuple, Params]:
            return (), objective.execution.over_models(lambda own: objective.gradient(p, own, b))(w)

        return by_chunks(objective, "gradients_with", every, (self.params, self.batch), (weights,))[1]

    def example_products_where(
        self, keep: Bool[Tensor, " examples"] | None, examples: Batch, vectors: Params
    ) -> tuple[Params, Params]:
        """Compute g(z), and C(z)·v for the examples to keep, zero for the others; None: for all."""
        if keep is None or bool(keep.all()):
            return self.example_products(examples, vectors)
        if not bool(keep.any()):
            gradients = self.example_gradients(examples)
            return gradients, each(torch.zeros_like, gradients)
        index, rest = keep.nonzero()[:, 0], (~keep).nonzero()[:, 0]
        chosen = vectors if is_single(vectors, self.params) else rows(vectors, index)
        chosen_gradients, curved = self.example_products(take(examples, index), chosen)
        order = torch.argsort(torch.cat([index, rest]))
        others = self.example_gradients(take(examples, rest))
        return (
            each(lambda a, b: torch.cat([a, b])[order], chosen_gradients, others),
            each(lambda a, b: torch.cat([a, torch.zeros_like(b)])[order], curved, others),
        )


def gradient(objective: Objective, params: Params, batch: Batch) -> Params:
    """Compute ḡ with the bits that autograd gives, since recorded steps are recomputed from it."""

    def value(p: Params, b: Batch) -> Params:
        return objective.gradient(p, ones(p, b), b, alone=True)

    return run(objective, "gradient", value, params, batch, exact=True, warm_up=RARE)


def stacked_gradients(
    objective: Objective, stack: Params, weights: Float[Tensor, "rows batch"], batch: Batch
) -> Params:
    """Compute ḡ(w) for every model of a stack, each with its own weights, on one batch."""

    def function(*args: Any) -> Params:
        with batched():
            return objective.execution.over_models(objective.gradient, (0, 0, None))(*args)

    return run(objective, "stacked_gradients", function, stack, weights, batch, exact=True)


def reads(
    objective: Objective, params: Params, batch: Batch, vectors: Params
) -> tuple[Float[Tensor, "vectors batch"], Params | None]:
    """Compute ⟨v, g(z)⟩/|Z| for every vector v of a stack; and ḡ, if a gradient is formed."""
    size, shared = size_of(batch), (params, batch)
    if objective.abilities.slopes:

        def slopes(p: Params, b: Batch, v: Params) -> tuple[tuple, Tensor]:
            def along(vector: Params) -> Tensor:
                return jvp(lambda q: objective.losses({**p, **q}, b), (objective.variables(p),), (vector,))[1] / size

            return (), objective.execution.over(along)(v)

        return by_chunks(objective, "slopes", slopes, shared, (vectors,))[1], None
    if not objective.abilities.reads:  # the weights' derivative cannot be taken through the backward pass
        gradients = example_gradients(objective, params, batch)
        return inner(vectors, gradients) / size, each(lambda t: t.mean(0), gradients)

    def products(p: Params, b: Batch, v: Params) -> tuple[Params, Tensor]:
        if objective.coupled and objective.abilities.vectors is Form.TRANSPOSED:
            value = objective.gradient(p, ones(p, b), b)
            return value, objective.execution.over(transposed(objective, p, b))(v)[1]
        value, pull = pullback(lambda w: objective.gradient(p, w, b), ones(p, b))
        return value, objective.execution.over(lambda vector: pull(vector)[0])(v)

    value, products_of = by_chunks(objective, "reads", products, shared, (vectors,))
    return products_of, value


def transposed(objective: Objective, params: Params, batch: Batch) -> Callable[[Params], tuple[Params, Tensor]]:
    """Return u ↦ Jᵀ·u and ⟨u, g(z)⟩/|Z|, as the transpose of the derivative of ḡ with gradients stopped once.

    That is its derivative in the weights too: a stopped value may depend on them, by statistics of the batch.
    """
    here, units = objective.variables(params), ones(params, batch)

    def push(vector: Params, change: Tensor) -> Params:
        def value(q: Params, weights: Tensor) -> Params:
            return objective.gradient({**params, **q}, weights, batch)

        with Elementary(), Passing():
            return jvp(value, (here, units), (vector, change))[1]

    return pullback(push, each(torch.zeros_like, here), torch.zeros_like(units))[1]


def example_gradients(objective: Objective, params: Params, examples: Batch) -> Params:
    """Compute g(z) for every example."""
    check_separable(objective, examples)
    if isinstance(examples, Picked):
        parts = [example_gradients(objective, params, group) for group in examples.groups]
        return in_order(parts, examples.order)

    def gradients(p: Params, b: Batch) -> tuple[tuple, Params]:
        def one(example: Batch) -> Params:
            return grad(lambda q: objective.example_loss({**p, **q}, example))(objective.variables(p))

        return (), objective.execution.over(one)(b)

    size = objective.execution.chunks.examples
    return by_chunks(objective, "example_gradients", gradients, (params,), (examples,), size)[1]


def check_separable(objective: Objective, examples: Batch) -> None:
    """Refuse single examples of a batch whose examples depend on each other."""
    if objective.coupled and isinstance(examples, TrainingBatch | Picked):
        raise no_form(COUPLED)


def in_order(parts: list[Params], order: Tensor) -> Params:
    """Join stacks of examples and put them in order."""
    return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


def is_single(vectors: Params, params: Params) -> bool:
    """Say whether this is a single vector, not a stack of vectors."""
    name = next(iter(vectors))
    return vectors[name].ndim == params[name].ndim


def form_of(objective: Objective, form: Form | None) -> Form:
    """Return the form, or refuse the method if its form is None."""
    if form is None:
        raise no_form(objective.abilities.reason)
    return form
