"""Gradients and Hessian-vector products of a task, many at once: pure functions of tensors, traced when they recur.

``Z`` is a batch of |Z| examples with losses ℓ(z, θ), g(z) and H(z) their gradients and Hessians, and
``ḡ = (1/|Z|) Σ g(z)``, ``H(Z) = (1/|Z|) Σ H(z)`` those of the batch. A *stack* has a first dimension of its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jvp

from leaveout._util.trees import Params, each, height, inner, pullback
from leaveout.errors import UnsupportedError
from leaveout.task.batches import Batch
from leaveout.task.calls import by_chunks, form_of, ones, run, stacked, staged
from leaveout.task.curvature_maps import HESSIAN, CurvatureMap, pushed, transposed
from leaveout.task.forms import Form
from leaveout.task.rewrites.elementary import Elementary
from leaveout.task.rewrites.kinks import inverse_widths
from leaveout.task.trace.tracer import RARE
from leaveout.task.training_batch import Picked, TrainingBatch, parts_of, size_of

if TYPE_CHECKING:
    from leaveout.task.task import Task

Rows: TypeAlias = tuple[Params, Float[Tensor, "rows batch"], Float[Tensor, "rows batch"]]
"""Stacks of vectors v, weights w of the batch's examples, and changes ẇ of these."""


def gradient(task: Task, params: Params, batch: Batch) -> Params:
    """Compute ḡ with the bits that autograd gives, since recorded steps are recomputed from it."""

    def value(p: Params, b: Batch) -> Params:
        return task.gradient(p, ones(p, b), b, alone=True)

    return run(task, "gradient", value, params, batch, exact=True, warm_up=RARE)


def stacked_gradients(task: Task, stack: Params, weights: Float[Tensor, "rows batch"], batch: Batch) -> Params:
    """Compute (1/|Z|) Σ w_z g(z) for every model of a stack, each with its own weights, on one batch."""
    function = task.over_models(task.gradient, (0, 0, None))
    return run(task, "stacked_gradients", function, stack, weights, batch, exact=True)


def batch_products(
    task: Task, params: Params, batch: Batch, vectors: Params, chunk: int | None = None, kind: CurvatureMap = HESSIAN
) -> tuple[Params, Params, Float[Tensor, "vectors batch"]]:
    """Compute ḡ, and Cᵀ·u and ⟨u, g(z)⟩/|Z| for every vector u of a stack; C is the Hessian, or replaces it."""

    def products(*args: Any) -> tuple[Params, Any]:
        return kind.products(task, *args)

    name = f"batch_products {kind.name(task.abilities.vectors)}"
    value, (curved, reads) = by_chunks(task, name, products, (params, batch), (vectors,), chunk)
    return value, curved, reads


def directional(
    task: Task, params: Params, batch: Batch, vector: Params
) -> tuple[Params | None, Params, Float[Tensor, " batch"]]:
    """Do what ``batch_products`` does for one vector, by the fastest form; ḡ is None if the form does not need it."""
    form = form_of(task, task.abilities.vector)
    result = run(task, f"directional {form.name}", partial(_product, task, form), params, batch, vector)
    return result if len(result) == 3 else (None, *result)


def directional_each(
    task: Task, params: Params, batch: Batch, vectors: Params, threads: int
) -> tuple[Params | None, Params, Float[Tensor, "vectors batch"]] | None:
    """Do what ``directional`` does for every vector of a stack, one vector per thread; None if there is no trace.

    The forward pass and the gradients of all activations do not depend on the vector and are computed once. For large
    models this is faster than all vectors at once, whose activations do not fit into the cache.
    """
    form = task.abilities.vector
    first = each(lambda t: t[0], vectors)
    along = form and staged(task, f"directional {form.name}", partial(_product, task, form), (params, batch), (first,))
    if not along:
        return None
    values: list[Params] = []

    def one(row: int) -> tuple[Params, Tensor]:
        *value, curved, reads = along(each(lambda t: t[row], vectors))
        values[:] = values or value
        return curved, reads

    curved, reads = stacked(one, height(vectors), threads)
    return (values[0] if values else None), curved, reads


def _product(task: Task, form: Form, params: Params, batch: Batch, vector: Params) -> tuple:
    """Compute Jᵀ·u and ⟨u, g(z)⟩/|Z| by a form; a form that also computes ḡ returns it first."""
    if form is Form.REVERSE_FORWARD:  # neither the gradient nor any per-example gradient is formed
        return (_coupled_slope if task.coupled else _slope)(task, params, batch, vector)
    if form is Form.FORWARD_REVERSE:
        return pushed(task, params, batch, vector)
    if form is Form.REVERSE_REVERSE:
        units = ones(params, batch)
        value, pull = pullback(lambda q, w: task.gradient({**params, **q}, w, batch), task.variables(params), units)
        return (value, *pull(vector))
    return (task.gradient(params, ones(params, batch), batch), *transposed(task, params, batch)(vector))


def _slope(task: Task, params: Params, batch: Batch, vector: Params) -> tuple[Params, Tensor]:
    """Compute the gradient of the losses' derivative along v, and that derivative, both divided by |Z|."""

    def along(q: Params) -> tuple[Tensor, Tensor]:
        slope = jvp(lambda r: task.losses({**params, **r}, batch), (q,), (vector,))[1] / size_of(batch)
        return slope.sum(), slope

    with Elementary():
        return grad(along, has_aux=True)(task.variables(params))


def _coupled_slope(task: Task, params: Params, batch: Batch, vector: Params) -> tuple[Params, Tensor]:
    """Compute the same for examples that depend on each other.

    It is the gradient, with respect to parameters, buffers and weights, of the loss's derivative along v plus the inner
    product of v with the buffers' new values.
    """
    moving = {name: vector[name] for name in task.chosen}

    def along(q: Params, weights: Tensor) -> Tensor:
        def objective(r: Params) -> tuple[Tensor, Params]:
            return task.objective({**params, **q, **r}, weights, batch)

        chosen = {name: q[name] for name in moving}
        _, slope, moved = jvp(objective, (chosen,), (moving,), has_aux=True)  # type: ignore[misc]
        return slope + sum((vector[name] * value).sum() for name, value in moved.items())

    with Elementary():
        return grad(along, (0, 1))(task.variables(params), ones(params, batch))


def weighted_changes(
    task: Task, params: Params, batch: Batch, stacks: Rows, chunk: int | None = None, kind: CurvatureMap = HESSIAN
) -> tuple[Params, Params]:
    """Compute ḡ, and C(w)·v + (1/|Z|) Σ ẇ_z g(z) for every row (v, w, ẇ): how ḡ(θ; w) changes along (v, ẇ).

    A row that leaves out an example has weight zero there, and −1 as its change: one pass gives both parts.
    """

    def changes(*args: Any) -> tuple[Params, Params]:
        return kind.changes(task, *args)

    return by_chunks(
        task, f"weighted_changes {kind.name(task.abilities.changes)}", changes, (params, batch), stacks, chunk
    )


def weight_products(
    task: Task, params: Params, batch: Batch, vectors: Params, chunk: int | None = None
) -> tuple[Params | None, Float[Tensor, "vectors batch"]]:
    """Compute ḡ, and ⟨v, g(z)⟩/|Z| for every vector v of a stack; ḡ is None if no gradient had to be formed."""
    if task.abilities.slopes:
        size = size_of(batch)

        def slopes(p: Params, b: Batch, v: Params) -> tuple[tuple, Tensor]:
            def along(vector: Params) -> Tensor:
                return jvp(lambda q: task.losses({**p, **q}, b), (task.variables(p),), (vector,))[1] / size

            return (), task.over(along)(v)

        return None, by_chunks(task, "slopes", slopes, (params, batch), (vectors,), chunk)[1]
    if not task.abilities.reads:  # the weights' derivative cannot be taken through the backward pass
        gradients = example_gradients(task, params, batch)
        return each(lambda t: t.mean(0), gradients), inner(vectors, gradients) / size_of(batch)

    def products(p: Params, b: Batch, v: Params) -> tuple[Params, Tensor]:
        if task.coupled and task.abilities.vectors is Form.TRANSPOSED:
            value, (_, reads) = HESSIAN.products(task, p, b, v)
            return value, reads
        value, pull = pullback(lambda w: task.gradient(p, w, b), ones(p, b))
        return value, task.over(lambda vector: pull(vector)[0])(v)

    return by_chunks(task, "weight_products", products, (params, batch), (vectors,), chunk)


def gradients_with(
    task: Task, params: Params, batch: Batch, weights: Float[Tensor, "rows batch"], chunk: int | None = None
) -> Params:
    """Compute ḡ(θ; w) of one model for every row of weights, even if examples depend on each other."""

    def gradients(p: Params, b: Batch, w: Tensor) -> tuple[tuple, Params]:
        return (), task.over_models(lambda one: task.gradient(p, one, b))(w)

    return by_chunks(task, "gradients_with", gradients, (params, batch), (weights,), chunk)[1]


def gradients_each(
    task: Task, params: Params, batch: Batch, weights: Float[Tensor, "rows batch"], threads: int
) -> Params | None:
    """Do what ``gradients_with`` does, one row per thread; None if there is no trace."""

    def value(p: Params, b: Batch, w: Tensor) -> Params:
        return task.gradient(p, w, b, alone=True)

    with_weights = staged(task, "gradient with weights", value, (params, batch), (weights[0],))
    return with_weights and stacked(lambda row: with_weights(weights[row]), len(weights), threads)


def kink_widths(task: Task, params: Params, batch: Batch) -> Params:
    """Compute 1/h of every function with kinks over the whole batch, by name, to be passed with the parameters."""
    return run(task, "kink_widths", lambda p, b: inverse_widths(task.outputs, p, parts_of(b)), params, batch)


def example_gradients(task: Task, params: Params, examples: Batch, chunk: int | None = None) -> Params:
    """Compute g(z) for every example."""
    _check_separable(task, examples)
    if isinstance(examples, Picked):
        return _in_order([example_gradients(task, params, group, chunk) for group in examples.groups], examples.order)

    def gradients(p: Params, b: Batch) -> tuple[tuple, Params]:
        def one(example: Batch) -> Params:
            return grad(lambda q: task.example_loss({**p, **q}, example))(task.variables(p))

        return (), task.over(one)(b)

    return by_chunks(task, "example_gradients", gradients, (params,), (examples,), chunk)[1]


def example_products(
    task: Task, params: Params, examples: Batch, vectors: Params, chunk: int | None = None, kind: CurvatureMap = HESSIAN
) -> tuple[Params, Params]:
    """Compute g(z) and C(z)·v for every example, each with a vector of its own, or all with one."""
    _check_separable(task, examples)
    shared = is_single(vectors, params)
    if isinstance(examples, Picked):
        parts = [example_products(task, params, *group, chunk, kind) for group in _groups(examples, vectors, shared)]
        return _in_order([a for a, _ in parts], examples.order), _in_order([b for _, b in parts], examples.order)

    def products(p: Params, v: Params, b: Batch) -> tuple[tuple, tuple[Params, Params]]:
        def one(example: Batch, vector: Params) -> tuple[Params, Params]:
            return kind.example(task, p, example, vector)

        return (), task.over(one, (0, None) if shared else 0)(b, v)

    fixed, stacked = ((params, vectors), (examples,)) if shared else ((params,), (vectors, examples))
    return by_chunks(
        task, f"example_products {kind.name(task.abilities.example)} {shared}", products, fixed, stacked, chunk
    )[1]


def _check_separable(task: Task, examples: Batch) -> None:
    if task.coupled and isinstance(examples, TrainingBatch | Picked):
        raise UnsupportedError(
            "BatchNorm in training mode ties the examples of a batch together, so that there is no gradient of one of "
            "them alone, which this method needs: use SGDIE(), TracIn(), ACC(transport='exact') or Replay().",
            code="examples-coupled",
        )


def _groups(picked: Picked, vectors: Params, shared: bool) -> list[tuple[Batch, Params]]:
    """Return each group with its vectors."""
    if shared:
        return [(group, vectors) for group in picked.groups]
    places = torch.argsort(picked.order).split([size_of(group) for group in picked.groups])
    return [(group, each(lambda t, at=at: t[at], vectors)) for group, at in zip(picked.groups, places, strict=True)]


def _in_order(parts: list[Params], order: Tensor) -> Params:
    return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


def is_single(vectors: Params, params: Params) -> bool:
    """Say whether this is a single vector, not a stack of vectors."""
    name = next(iter(vectors))
    return vectors[name].ndim == params[name].ndim
