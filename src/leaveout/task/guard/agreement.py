"""Each kind of derivative that the methods use, computed as they do and compared with plain autograd's results.

Every function here computes one kind, in the form given by the task's abilities, and says whether it is correct at a
point; without a point, only that it can be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from leaveout._util.trees import Params, distance, each, norm
from leaveout.diff.hessian import Hessian, pull_by_example
from leaveout.diff.operator import example_gradients, gradient, stacked_gradients
from leaveout.diff.operator import reads as computed_reads
from leaveout.diff.outer import Fisher, GaussNewton
from leaveout.task import batches
from leaveout.task.guard.differences import FLOOR, are_transposed, inner
from leaveout.task.guard.points import Point, reads
from leaveout.task.objective import Objective
from leaveout.task.preparing import is_large
from leaveout.task.rewrites.missing_rules import batched


def examples(objective: Objective, at: Params, batch: Any, point: Point | None) -> bool:
    """Check per-example gradients, and the batch's."""
    gradients, whole = example_gradients(objective, at, batch), gradient(objective, at, batch)
    return point is None or (point.has_examples(gradients) and point.has_gradient(whole))


def models(objective: Objective, at: Params, batch: Any, point: Point | None) -> bool:
    """Check gradients and losses of two models at once, the second without the first example."""
    size = len(batches.leaves(batch)[0])
    stack = each(lambda t: torch.stack([t, t]), at)
    weights = _like(at).new_ones((2, size))
    weights[1, 0] = 0
    gradients = stacked_gradients(objective, stack, weights, batch)
    with batched():
        objective.execution.over_models(objective.query_losses, (0, None))(stack, batch)
    if point is None:
        return True
    back = each(lambda f, e: f[1] + e[0] / size, gradients, point.examples)
    return point.has_gradient(_row(gradients, 0)) and point.has_gradient(back)


def weights(objective: Objective, at: Params, batch: Any, point: Point | None) -> bool:
    """Check inner products with per-example gradients, as the derivative in the examples' weights."""
    reads, value = computed_reads(objective, at, batch, _stack(_directions(at, point)))
    return point is None or (
        (value is None or point.has_gradient(value)) and point.has_reads(reads[0], 0) and point.has_reads(reads[1], 1)
    )


def vector(objective: Objective, at: Params, batch: Any, point: Point | None) -> bool:
    """Check Jᵀ·u for one vector."""
    curved, reads, value, _ = Hessian(objective, at, batch).pull(_stack(_directions(at, point)[:1]))
    if point is None:
        return True
    right = value is None or point.has_gradient(value)
    return right and _is_transposed(objective, batch, point, curved) and point.has_reads(reads[0])


def together(objective: Objective, at: Params, batch: Any, point: Point | None) -> bool:
    """Check Jᵀ·u for one vector together with every example's gradient."""
    curved, reads, shares = pull_by_example(objective, at, batch, _directions(at, point)[0])
    if point is None:
        return True
    whole = each(lambda t: t * point.size, shares)
    stack = each(lambda t: t[None], curved)
    return _is_transposed(objective, batch, point, stack) and point.has_reads(reads) and point.has_examples(whole)


def vectors(objective: Objective, at: Params, batch: Any, point: Point | None) -> bool:
    """Check Jᵀ·u for a stack of vectors."""
    curved, reads, value, _ = Hessian(objective, at, batch).pull(_stack(_directions(at, point)))
    return point is None or (
        (value is None or point.has_gradient(value))
        and all(point.has_reads(reads[i], i) for i in (0, 1))
        and _is_transposed(objective, batch, point, curved)
    )


def changes(objective: Objective, at: Params, batch: Any, point: Point | None) -> bool:
    """Check J·v for a stack of vectors; for the last, the weight of the first example changes as well.

    For a large model only the last is checked, which has both parts.
    """
    size, pair = len(batches.leaves(batch)[0]), _directions(at, point)
    given = _stack(pair[1:] if is_large(objective) else pair)
    rows = len(_like(given))
    ones = _like(at).new_ones((rows, size))
    added = torch.zeros_like(ones)
    added[-1, 0] = 1
    changed, value = Hessian(objective, at, batch).push(given, ones, added)
    if point is None:
        return True
    last = each(lambda f, e: f[-1] - e[0] / size, changed, point.examples)
    if not ((value is None or point.has_gradient(value)) and point.difference.agrees(last, 1)):
        return False
    if rows == 1:
        return True
    curved = _stack([_row(changed, 0), last])
    return point.difference.agrees(_row(changed, 0), 0) and (
        not objective.abilities.symmetric or are_transposed(curved, curved, given, point.difference.gradient)
    )


def example(objective: Objective, at: Params, batch: Any, point: Point | None) -> bool:
    """Check J·v of every example, with one vector for all and with one each; for a large model, only the latter."""
    size, u = len(batches.leaves(batch)[0]), _directions(at, point)[0]
    own = each(lambda t: t.expand(size, *t.shape), u)
    for given in (own,) if is_large(objective) else (u, own):
        value, curved = Hessian(objective, at, batch).example_products(batch, given)
        mean = each(lambda t: t.mean(0), curved)
        del curved  # for a large model, gigabytes
        if point is not None and not (point.has_examples(value) and point.difference.agrees(mean, 0)):
            return False
    return True


def outer(objective: Objective, at: Params, batch: Any, point: Point | None) -> bool:
    """Check products with the Fisher and Gauss-Newton matrices; for a large model the latter, which has all parts."""
    for kind in (GaussNewton,) if is_large(objective) else (Fisher, GaussNewton):
        curved, reads, value, _ = kind(objective, at, batch).pull(_stack(_directions(at, point)[:1]))
        if point is None:
            continue
        wanted = _fisher(objective, point) if kind is Fisher else _gauss_newton(objective, point, batch)
        if not ((value is None or point.has_gradient(value)) and point.has_reads(reads[0], 0)):
            return False
        if wanted is not None:
            scale = max(norm(wanted), FLOOR * norm(point.difference.gradient))
            missed = distance(_row(curved, 0), wanted)
            if missed > max(1e-3, point.difference.tolerance) * scale:
                return False
    return True


def slope(objective: Objective, at: Params, batch: Any, point: Point | None) -> bool:
    """Check the derivative of the query's loss against finite differences of that loss itself.

    A deep network of ReLUs has kinks within any step that is not tiny, so smaller and smaller steps are tried; a wrong
    derivative agrees with none of them.
    """
    steps, near, rounding = ((1e-6, 1e-7, 1e-8), 1e-5, 1e-9) if objective.is_wide else ((1e-3,), 1e-2, 1e-3)

    def mean(params: Params) -> Tensor:
        with objective.unstopped():
            return objective.query_losses(params, batch).mean()

    gradient = grad(mean)(at)
    usual = norm(gradient) / sum(tensor.numel() for tensor in at.values()) ** 0.5

    def agrees(u: Params, step: float) -> bool:
        up, down = (float(objective.query_losses(_moved(at, u, s), batch).mean()) for s in (step, -step))
        change = (up - down) / (2 * step)
        scale = near * max(abs(change), usual * norm(u)) + rounding * abs(up)
        return point is None or abs(inner(gradient, u) - change) <= scale

    return all(any(agrees(u, step) for step in steps) for u in _directions(at, point))


def _is_transposed(objective: Objective, batch: Any, point: Point, curved: Params) -> bool:
    """Say whether these are Jᵀ·u for the first directions, as differences say and products J·v that are right."""
    near = point.difference.agrees if objective.abilities.symmetric else point.difference.agrees_transposed
    if not all(near(_row(curved, i), i) for i in range(len(_like(curved)))):
        return False
    if objective.abilities.changes is None or is_large(objective):
        return True
    given, units = _stack(point.difference.directions), _like(point.at).new_ones((2, point.size))
    pushed, _ = Hessian(objective, point.at, batch).push(given, units, torch.zeros_like(units))
    return are_transposed(curved, pushed, given, point.difference.gradient)


def _fisher(objective: Objective, point: Point) -> Params:
    """Compute (1/|Z|) Σ g ⟨g, u⟩ of the losses without their L2 term, whose curvature is added."""
    u = point.difference.directions[0]
    bare = each(lambda e, p: e - objective.l2 * p, point.examples, point.at)
    share = reads(bare, u)
    return each(lambda b, d: torch.tensordot(share, b, 1) + objective.l2 * d, bare, u)


def _gauss_newton(objective: Objective, point: Point, batch: Any) -> Params | None:
    """Compute Jᵀ A J u by differences of the outputs and of the loss's gradient in them, and a plain backward pass.

    None if the outputs have a kink.
    """
    u, step = point.difference.directions[0], 1e-5 if objective.is_wide else 1e-2
    tracked = {name: tensor.detach().requires_grad_() for name, tensor in point.at.items()}
    outputs, targets = objective.outputs(tracked, batch)
    with torch.no_grad():
        up, down = (objective.outputs(_moved(point.at, u, s), batch)[0] for s in (step, -step))
    change = (up - down) / (2 * step)
    if float((up + down - 2 * outputs.detach()).norm()) > 2e-3 * step * float(change.norm()):
        return None

    scale = batch.scale if isinstance(getattr(batch, "scale", None), Tensor) else 1.0

    def steepness(at: Tensor) -> Tensor:
        leaf = at.detach().requires_grad_()
        return torch.autograd.grad((objective.output_losses(leaf, targets) * scale).mean(), leaf)[0]

    bent = (steepness(outputs + step * change) - steepness(outputs - step * change)) / (2 * step)
    back = torch.autograd.grad(outputs, list(tracked.values()), bent, allow_unused=True)
    pairs = zip(u.items(), back, strict=True)
    return {name: objective.l2 * d + (0 if b is None else b) for (name, d), b in pairs}


def _directions(at: Params, point: Point | None) -> tuple[Params, Params]:
    ones = each(torch.ones_like, at)
    return (ones, ones) if point is None else point.difference.directions


def _moved(at: Params, direction: Params, step: float) -> Params:
    return each(lambda p, d: p + step * d, at, direction)


def _like(params: Params) -> Tensor:
    return next(iter(params.values()))


def _stack(vectors: Sequence[Params]) -> Params:
    return each(lambda *rows: torch.stack(rows), *vectors)


def _row(stack: Params, i: int) -> Params:
    return each(lambda t: t[i], stack)
