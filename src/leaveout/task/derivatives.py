"""Gradients and Hessian-vector products of a task, many at once: pure functions of tensors, traced when they recur.

``Z`` is a batch of |Z| examples with losses ℓ(z, θ), g(z) and H(z) their gradients and Hessians, and
``ḡ = (1/|Z|) Σ g(z)``, ``H(Z) = (1/|Z|) Σ H(z)`` those of the batch. A *stack* has a first dimension of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jvp, vjp

from leaveout._util.trees import Params, each, inner, inner_rows, pullback
from leaveout.errors import UnsupportedError
from leaveout.task.batches import Batch, map_leaves
from leaveout.task.calls import by_chunks, form_of, no_form, ones, run
from leaveout.task.elementary import Elementary
from leaveout.task.folding import Folded
from leaveout.task.forms import Form
from leaveout.task.kinks import inverse_widths
from leaveout.task.rewriting import Passing
from leaveout.task.training_batch import Picked, TrainingBatch, joined, parts_of, size_of

if TYPE_CHECKING:
    from leaveout.task.task import Task

Rows: TypeAlias = tuple[Params, Float[Tensor, "rows batch"], Float[Tensor, "rows batch"]]
"""Stacks of vectors v, weights w of the batch's examples, and changes ẇ of these."""


def gradient(task: Task, params: Params, batch: Batch) -> Params:
    """ḡ, to the last bit what autograd gives: recorded steps are taken again with it."""
    return run(task, "gradient", lambda p, b: task.gradient(p, ones(p, b), b), params, batch, exact=True)


def stacked_gradients(task: Task, stack: Params, weights: Float[Tensor, "rows batch"], batch: Batch) -> Params:
    """(1/|Z|) Σ w_z g(z) of every model of a stack, with its own weights, on one batch."""
    function = task.over_models(task.gradient, (0, 0, None))
    return run(task, "stacked_gradients", function, stack, weights, batch, exact=True)


def hessian_products(
    task: Task, params: Params, batch: Batch, vectors: Params, chunk: int | None = None
) -> tuple[Params, Params, Float[Tensor, "vectors batch"]]:
    """ḡ, and for every vector u of a stack Jᵀ·u and ⟨u, g(z)⟩/|Z|; J = ∂ḡ/∂θ is H(Z) where nothing stops gradients."""
    form = form_of(task, task.abilities.vectors)

    def products(p: Params, b: Batch, v: Params) -> tuple[Params, tuple[Params, Tensor]]:
        if form is Form.REVERSE_REVERSE:  # both are parts of one pull-back
            value, pull = pullback(lambda q, w: task.gradient({**p, **q}, w, b), task.own(p), ones(p, b))
            return value, task.over(pull)(v)
        if form is Form.FORWARD_REVERSE:
            value = task.gradient(p, ones(p, b), b)
            return value, task.over(lambda vector: _pushed(task, p, b, vector)[1:])(v)
        value, pull = pullback(lambda w: task.gradient(p, w, b), ones(p, b))
        transposed = _transposed(task, p, b)
        return value, task.over(lambda vector: (transposed(vector), pull(vector)[0]))(v)

    name = f"hessian_products {form.name}"
    value, (curved, reads) = by_chunks(task, name, products, (params, batch), (vectors,), chunk)
    return value, curved, reads


def directional(
    task: Task, params: Params, batch: Batch, vector: Params
) -> tuple[Params | None, Params, Float[Tensor, " batch"]]:
    """As ``hessian_products``, for one vector, by the quickest form; ḡ is None where the form does without it."""
    form = form_of(task, task.abilities.vector)

    def products(p: Params, b: Batch, v: Params) -> tuple:
        if form is Form.REVERSE_FORWARD:  # neither the gradient nor any per-example gradient is formed
            return (_coupled_slope if task.coupled else _slope)(task, p, b, v)
        if form is Form.FORWARD_REVERSE:
            return _pushed(task, p, b, v)
        if form is Form.REVERSE_REVERSE:
            value, pull = pullback(lambda q, w: task.gradient({**p, **q}, w, b), task.own(p), ones(p, b))
            return (value, *pull(v))
        value, pull = pullback(lambda w: task.gradient(p, w, b), ones(p, b))
        return value, _transposed(task, p, b)(v), pull(v)[0]

    result = run(task, f"directional {form.name}", products, params, batch, vector)
    return result if len(result) == 3 else (None, *result)


def _slope(task: Task, params: Params, batch: Batch, vector: Params) -> tuple[Params, Tensor]:
    """The gradient of the losses' derivative along v, and that derivative, both divided by |Z|."""

    def along(q: Params) -> tuple[Tensor, Tensor]:
        slope = jvp(lambda r: task.losses({**params, **r}, batch), (q,), (vector,))[1] / size_of(batch)
        return slope.sum(), slope

    with Elementary():
        return grad(along, has_aux=True)(task.own(params))


def _coupled_slope(task: Task, params: Params, batch: Batch, vector: Params) -> tuple[Params, Tensor]:
    """The same for examples that depend on each other: the gradient, in parameters, buffers and weights, of the loss's
    derivative along v and of what v makes of the buffers' new values.
    """
    moving = {name: vector[name] for name in task.chosen}

    def along(q: Params, weights: Tensor) -> Tensor:
        def objective(r: Params) -> tuple[Tensor, Params]:
            return task.objective({**params, **q, **r}, weights, batch)

        own = {name: q[name] for name in moving}
        _, slope, moved = jvp(objective, (own,), (moving,), has_aux=True)  # type: ignore[misc]
        return slope + sum((vector[name] * value).sum() for name, value in moved.items())

    with Elementary():
        return grad(along, (0, 1))(task.own(params), ones(params, batch))


def _pushed(task: Task, params: Params, batch: Batch, vector: Params) -> tuple[Params, Params, Tensor]:
    """ḡ, its derivative along v, and that of each example's loss, divided by |Z|."""
    size = size_of(batch)

    def mean(q: Params) -> tuple[Tensor, Tensor]:
        with Folded():
            losses = task.losses({**params, **q}, batch)
        return losses.sum() / size, losses

    values, changes = jvp(grad(mean, has_aux=True), (task.own(params),), (vector,))  # type: ignore[misc]
    return values[0], changes[0], changes[1] / size


def _transposed(task: Task, params: Params, batch: Batch) -> Callable[[Params], Params]:
    """U ↦ Jᵀ·u, as the transpose of v ↦ J·v with gradients stopped once."""
    units = ones(params, batch)

    def push(vector: Params) -> Params:
        with Passing():
            return jvp(lambda q: task.gradient({**params, **q}, units, batch), (task.own(params),), (vector,))[1]

    _, pull = pullback(push, each(torch.zeros_like, task.own(params)))
    return lambda vector: pull(vector)[0]


def weighted_changes(
    task: Task, params: Params, batch: Batch, stacks: Rows, chunk: int | None = None
) -> tuple[Params, Params]:
    """ḡ, and for every row (v, w, ẇ) of the stacks J(w)·v + (1/|Z|) Σ ẇ_z g(z): how ḡ(θ; w) changes along (v, ẇ).

    With an example's weight zero and changing by −1, that is a row without the example, in one pass.
    """
    form = form_of(task, task.abilities.changes)

    def products(p: Params, b: Batch, v: Params, w: Tensor, dw: Tensor) -> tuple[Params, Params]:
        def slope(q: Params, weights: Tensor) -> Params:
            return task.gradient({**p, **q}, weights, b)

        def one(vector: Params, weights: Tensor, change: Tensor) -> Params:
            if form is Form.REVERSE_REVERSE:
                _, pull = pullback(lambda q: slope(q, weights), task.own(p))
                return each(torch.add, pull(vector)[0], slope(task.own(p), change))
            with Passing() if form is Form.THROUGH else nullcontext():
                return jvp(slope, (task.own(p), weights), (vector, change))[1]

        return slope(task.own(p), ones(p, b)), task.over(one)(v, w, dw)

    return by_chunks(task, f"weighted_changes {form.name}", products, (params, batch), stacks, chunk)


def weight_products(
    task: Task, params: Params, batch: Batch, vectors: Params, chunk: int | None = None
) -> tuple[Params | None, Float[Tensor, "vectors batch"]]:
    """ḡ, and ⟨v, g(z)⟩/|Z| for every vector v of a stack; ḡ is None where losses' derivatives along v serve."""
    if task.abilities.slopes:
        size = size_of(batch)

        def slopes(p: Params, b: Batch, v: Params) -> tuple[tuple, Tensor]:
            def along(vector: Params) -> Tensor:
                return jvp(lambda q: task.losses({**p, **q}, b), (task.own(p),), (vector,))[1] / size

            return (), task.over(along)(v)

        return None, by_chunks(task, "slopes", slopes, (params, batch), (vectors,), chunk)[1]
    if not task.abilities.reads:  # the weights' derivative cannot be taken through the backward pass
        gradients = example_gradients(task, params, batch)
        return each(lambda t: t.mean(0), gradients), inner(vectors, gradients) / size_of(batch)

    def products(p: Params, b: Batch, v: Params) -> tuple[Params, Tensor]:
        value, pull = pullback(lambda w: task.gradient(p, w, b), ones(p, b))
        return value, task.over(lambda vector: pull(vector)[0])(v)

    return by_chunks(task, "weight_products", products, (params, batch), (vectors,), chunk)


def gradients_with(
    task: Task, params: Params, batch: Batch, weights: Float[Tensor, "rows batch"], chunk: int | None = None
) -> Params:
    """ḡ(θ; w) of one model for every row of weights, also where examples depend on each other."""

    def gradients(p: Params, b: Batch, w: Tensor) -> tuple[tuple, Params]:
        return (), task.over_models(lambda one: task.gradient(p, one, b))(w)

    return by_chunks(task, "gradients_with", gradients, (params, batch), (weights,), chunk)[1]


def kink_widths(task: Task, params: Params, batch: Batch) -> Params:
    """1/h of every function with kinks, over the whole batch, by the names under which they go with parameters."""
    return run(task, "kink_widths", lambda p, b: inverse_widths(task.outputs, p, parts_of(b)), params, batch)


def example_gradients(task: Task, params: Params, examples: Batch, chunk: int | None = None) -> Params:
    """g(z) for every example."""
    _check_separable(task, examples)
    if isinstance(examples, Picked):
        return _in_order([example_gradients(task, params, group, chunk) for group in examples.groups], examples.order)

    def gradients(p: Params, b: Batch) -> tuple[tuple, Params]:
        def one(example: Batch) -> Params:
            return grad(lambda q: task.example_loss({**p, **q}, example))(task.own(p))

        return (), task.over(one)(b)

    return by_chunks(task, "example_gradients", gradients, (params,), (examples,), chunk)[1]


def example_products(
    task: Task, params: Params, examples: Batch, vectors: Params, chunk: int | None = None
) -> tuple[Params, Params]:
    """g(z) and H(z)·v for every example, each with a vector of its own, or all with one.

    The value of the derivative of the gradient is the gradient itself: both come from one pass.
    """
    _check_separable(task, examples)
    form = form_of(task, task.abilities.example)
    shared = is_single(vectors, params)
    if isinstance(examples, Picked):
        parts = [example_products(task, params, *group, chunk) for group in _groups(examples, vectors, shared)]
        return _in_order([a for a, _ in parts], examples.order), _in_order([b for _, b in parts], examples.order)

    def products(p: Params, v: Params, b: Batch) -> tuple[tuple, tuple[Params, Params]]:
        def one(example: Batch, vector: Params) -> tuple[Params, Params]:
            def slope(q: Params) -> Params:
                return grad(lambda r: task.example_loss({**p, **r}, example))(q)

            if form is Form.REVERSE_REVERSE:
                value, pull = pullback(slope, task.own(p))
                return value, pull(vector)[0]
            with Passing() if form is Form.THROUGH else nullcontext():
                both = jvp(slope, (task.own(p),), (vector,))
            return both[0], both[1]

        return (), task.over(one, (0, None) if shared else 0)(b, v)

    fixed, stacked = ((params, vectors), (examples,)) if shared else ((params,), (vectors, examples))
    return by_chunks(task, f"example_products {form.name} {shared}", products, fixed, stacked, chunk)[1]


def outer_products(
    task: Task, params: Params, batch: Batch, vectors: Params, chunk: int | None = None, *, fisher: bool
) -> tuple[Params, Params, Float[Tensor, "vectors batch"]]:
    """ḡ, and for every vector v of a stack C(Z)·v and ⟨v, g(z)⟩/|Z|, with C = (1/|Z|) Σ Jᵀ A J instead of the Hessian.

    Gauss-Newton: J the Jacobian of z's outputs, A the Hessian of the loss in them. Fisher: J the gradient of z's loss,
    A = 1. The L2 term's curvature is known, and added as it is.
    """

    def products(p: Params, b: Batch, v: Params) -> tuple[Params, tuple[Params, Tensor]]:
        return _outer(task, p, b, fisher, lambda one: task.over(one)(v))

    value, (curved, reads) = by_chunks(task, f"outer_products {fisher}", products, (params, batch), (vectors,), chunk)
    return value, curved, reads


def outer_changes(
    task: Task, params: Params, batch: Batch, stacks: Rows, chunk: int | None = None, *, fisher: bool
) -> tuple[Params, Params]:
    """As ``weighted_changes``, with C as in ``outer_products``."""

    def products(p: Params, b: Batch, *rows: Any) -> tuple[Params, Params]:
        return _outer(task, p, b, fisher, lambda one: task.over(lambda *row: one(*row)[0])(*rows))

    return by_chunks(task, f"outer_changes {fisher}", products, (params, batch), stacks, chunk)


def example_outer_products(
    task: Task, params: Params, examples: Batch, vectors: Params, chunk: int | None = None, *, fisher: bool
) -> tuple[Params, Params]:
    """g(z) and C(z)·v for every example, each with a vector of its own, or all with one; C as in ``outer_products``."""
    _check_separable(task, examples)
    shared = is_single(vectors, params)
    if isinstance(examples, Picked):
        groups = _groups(examples, vectors, shared)
        parts = [example_outer_products(task, params, *group, chunk, fisher=fisher) for group in groups]
        return _in_order([a for a, _ in parts], examples.order), _in_order([b for _, b in parts], examples.order)

    def products(p: Params, v: Params, b: Batch) -> tuple[tuple, tuple[Params, Params]]:
        def one(example: Batch, vector: Params) -> tuple[Params, Params]:
            single = map_leaves(lambda leaf: leaf.unsqueeze(0), example)
            value, (curved, _) = _outer(task, p, single, fisher, lambda function: function(vector))
            return value, curved

        return (), task.over(one, (0, None) if shared else 0)(b, v)

    fixed, stacked = ((params, vectors), (examples,)) if shared else ((params,), (vectors, examples))
    return by_chunks(task, f"example_outer_products {fisher} {shared}", products, fixed, stacked, chunk)[1]


def _check_separable(task: Task, examples: Batch) -> None:
    if task.coupled and isinstance(examples, TrainingBatch | Picked):
        raise UnsupportedError(
            "BatchNorm in training mode ties the examples of a batch together, so that there is no gradient of one of "
            "them alone, which this method needs: use SGDIE(), TracIn(), ACC(transport='exact') or Replay().",
            code="examples-coupled",
        )


def _groups(picked: Picked, vectors: Params, shared: bool) -> list[tuple[Batch, Params]]:
    """Each group with its vectors."""
    if shared:
        return [(group, vectors) for group in picked.groups]
    places = torch.argsort(picked.order).split([size_of(group) for group in picked.groups])
    return [(group, each(lambda t, at=at: t[at], vectors)) for group, at in zip(picked.groups, places, strict=True)]


def _in_order(parts: list[Params], order: Tensor) -> Params:
    return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


def is_single(vectors: Params, params: Params) -> bool:
    """Whether it is one vector, and not a stack of them."""
    name = next(iter(vectors))
    return vectors[name].ndim == params[name].ndim


def _outer(
    task: Task, params: Params, batch: Batch, fisher: bool, over: Callable[[Callable], Any]
) -> tuple[Params, Any]:
    """ḡ, and what ``over`` makes of the function v ↦ (C·v, ⟨v, g(z)⟩/|Z|).

    Given weights w and their change ẇ as well, that function gives C(Z; w)·v + (1/|Z|) Σ ẇ_z g(z) for C·v. Outputs may
    have any shape; only the losses are known to have one for each example.
    """
    if not task.abilities.outer:
        raise no_form(task.abilities.reason)
    own, size, batch = task.own(params), size_of(batch), joined(batch)
    scale = batch.scale if isinstance(batch, TrainingBatch) and isinstance(batch.scale, Tensor) else 1.0

    def both(q: Params) -> tuple[Tensor, Any]:
        outputs, targets = task.outputs({**params, **q}, batch)
        return (task.output_losses(outputs, targets) * scale if fisher else outputs), targets

    outputs, pull, targets = vjp(both, own, has_aux=True)  # type: ignore[misc]
    units = ones(params, batch)

    def losses(at: Tensor) -> Tensor:
        return at if fisher else task.output_losses(at, targets) * scale

    def slopes(at: Tensor, weights: Tensor) -> Tensor:
        return grad(lambda o: (weights * losses(o)).sum())(at)

    def one(vector: Params, weights: Tensor = units, added: Tensor | None = None) -> tuple[Params, Tensor]:
        change = _along(task, lambda q: both(q)[0], own, vector)
        bent = weights * change if fisher else _along(task, lambda o: slopes(o, weights), outputs, change)
        curved = each(lambda c, v: c + task.l2 * weights.mean() * v, pull(bent / size)[0], vector)
        if added is not None:
            gradient = pull(slopes(outputs, added) / size)[0]
            curved = each(lambda c, g, q: c + g + task.l2 * added.mean() * q, curved, gradient, own)
        decay = task.l2 * inner_rows(*({n: t[None] for n, t in side.items()} for side in (own, vector)))
        return curved, (_along(task, losses, outputs, change) + decay) / size

    value = each(lambda g, q: g + task.l2 * q, pull(slopes(outputs, units) / size)[0], own)
    return value, over(one)


def _along(task: Task, function: Callable, at: Any, vector: Any) -> Any:
    """The derivative of a function along a vector; by two pull-backs where there is no forward mode."""
    if task.abilities.forward:
        return jvp(function, (at,), (vector,))[1]
    value, pull = pullback(function, at)
    return pullback(lambda cotangent: pull(cotangent)[0], torch.zeros_like(value))[1](vector)[0]
