"""Solves A·x = b for a symmetric A known by its products, for many right-hand sides at once, one per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout.errors import MismatchError, UnsupportedError

Apply: TypeAlias = Callable[[Tensor], Tensor]
"""Rows x ↦ rows A·x."""

REMEDY = "give a larger damping=, or train on until the loss is flat"


def direct(apply: Apply, right: Float[Tensor, "rows width"], chunk: int) -> Float[Tensor, "rows width"]:
    """Solve by the matrix itself, ``chunk`` columns at a time, and its Cholesky factor.

    >>> A = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    >>> direct(lambda x: x @ A, torch.tensor([[2.0, 2.0]]), 1).tolist()
    [[1.0, 0.5]]
    """
    width = right.shape[1]
    unit = torch.eye(width, dtype=right.dtype, device=right.device)
    matrix = torch.cat([apply(part) for part in unit.split(chunk)])
    factor, failed = torch.linalg.cholesky_ex((matrix + matrix.T) / 2)
    if int(failed):
        lowest = float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[0])
        raise UnsupportedError(
            f"The Hessian is not positive definite (an eigenvalue is {lowest:.3g}): {REMEDY}.",
            code="hessian-not-positive",
        )
    return torch.cholesky_solve(right.T, factor).T


def conjugate_gradients(
    apply: Apply, right: Float[Tensor, "rows width"], steps: int, tolerance: float
) -> Float[Tensor, "rows width"]:
    """Solve by conjugate gradients until ‖b − A·x‖ ≤ tolerance·‖b‖ in every row.

    >>> A = torch.tensor([[2.0, 1.0], [1.0, 4.0]])
    >>> x = conjugate_gradients(lambda x: x @ A, torch.tensor([[3.0, 5.0]]), 5, 1e-6)
    >>> x.round(decimals=4).tolist()
    [[1.0, 1.0]]
    """
    x = torch.zeros_like(right)
    residual, direction = right.clone(), right.clone()
    size = residual.square().sum(1)
    enough = tolerance**2 * size
    for _ in range(steps):
        if bool((size <= enough).all()):
            return x
        product = apply(direction)
        bend = (direction * product).sum(1)
        if bool(((bend <= 0) & (size > enough)).any()):
            raise UnsupportedError(
                f"The Hessian is not positive definite (a direction bends downward): {REMEDY}.",
                code="hessian-not-positive",
            )
        share = torch.where(size > enough, size / bend, 0.0)[:, None]
        x = x + share * direction
        residual = residual - share * product
        fresh = residual.square().sum(1)
        direction = residual + torch.where(size > 0, fresh / size, 0.0)[:, None] * direction
        size = fresh
    worst = float((size / right.square().sum(1).clamp(min=1e-300)).max().sqrt())
    raise MismatchError(
        f"Conjugate gradients left {worst:.2g} of the right-hand side after {steps} products: give more steps=, or "
        "a larger damping=.",
        code="solver-not-converged",
    )


def lissa(
    samples: Iterator[Apply], right: Float[Tensor, "rows width"], steps: int, scale: float
) -> Float[Tensor, "rows width"]:
    """Solve by the recursion x ← b + x − (A_j/scale)·x with a fresh sample A_j of the matrix each time (LiSSA).

    Returns the mean of the second half of the iterates, divided by the scale; it must exceed the samples' eigenvalues.
    """
    x, total = right.clone(), torch.zeros_like(right)
    for step in range(steps):
        x = right + x - next(samples)(x) / scale
        if step >= steps // 2:
            total += x
    if not bool(torch.isfinite(total).all()):
        raise UnsupportedError(
            f"LiSSA diverged: the Hessian is not positive definite, or its largest part was missed; {REMEDY}.",
            code="hessian-not-positive",
        )
    return total / (steps - steps // 2) / scale
