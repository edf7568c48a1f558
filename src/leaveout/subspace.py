"""The directions in which a run's curvature is largest."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout.coasting import Layout
from leaveout.curvature import Curvature
from leaveout.moment import Moment
from leaveout.resources import Cost
from leaveout.trajectory import Trajectory
from leaveout.vectors import PARAM

SAMPLES = 8
ROUNDS = 4
EXTRA = 4


def top_directions(
    trajectory: Trajectory, layout: Layout, kind: type[Curvature], rank: int, cost: Cost
) -> Float[Tensor, "rank width"]:
    """Orthonormal rows that span the top eigenvectors of H̄, the mean of the batch Hessians at evenly spaced steps.

    By subspace iteration ``Q ← orth(H̄ Q)`` from a seeded random start, with a few directions more than are kept.
    """
    count = min(len(trajectory), SAMPLES)
    chosen = {round(i) for i in torch.linspace(0, len(trajectory) - 1, count).tolist()}
    moments = [trajectory.moment(index) for index in sorted(chosen)]
    like = next(iter(moments[0].before[PARAM].values()))
    width = min(rank + EXTRA, layout.width)
    start = torch.randn(layout.width, width, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(start.to(like))[0]
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(_mean_product(trajectory, moments, layout, kind, basis))[0]
    cost.hvps += (ROUNDS + 1) * width * len(moments)
    # Which of the directions are curved most: the eigenvectors of H̄ within their span.
    values, vectors = torch.linalg.eigh(basis.T @ _mean_product(trajectory, moments, layout, kind, basis))
    return (basis @ vectors[:, values.abs().argsort(descending=True)[:rank]]).T


def _mean_product(
    trajectory: Trajectory,
    moments: list[Moment],
    layout: Layout,
    kind: type[Curvature],
    basis: Float[Tensor, "width directions"],
) -> Float[Tensor, "width directions"]:
    """H̄ times each column."""
    total = torch.zeros_like(basis)
    for moment in moments:
        curvature = kind(trajectory.task, moment.params, moment.batch)
        total += layout.flatten(curvature.products(layout.unflatten(basis.T))[0]).T
    return total / len(moments)
