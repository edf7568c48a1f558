"""The directions in which a run's curvature is largest."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.sweep import budget
from leaveout.sweep.curvature import Curvature
from leaveout.sweep.free_transport import Layout
from leaveout.trajectory.trajectory import Trajectory

SAMPLES = 8
ROUNDS = 4
EXTRA = 4


def top_directions(
    trajectory: Trajectory, layout: Layout, kind: type[Curvature], rank: int, resources: Resources, cost: Cost
) -> Float[Tensor, "rank width"]:
    """Return orthonormal rows that span the top eigenvectors of H̄, the mean batch Hessian at evenly spaced steps.

    They come from subspace iteration ``Q ← orth(H̄ Q)`` from a seeded random start, with a few more directions than are
    kept.
    """
    count = min(len(trajectory), SAMPLES)
    chosen = {round(i) for i in torch.linspace(0, len(trajectory) - 1, count).tolist()}
    width = min(rank + EXTRA, layout.width)
    held = budget.directions_bytes(trajectory, width, len(chosen))
    budget.check(resources, trajectory, held, f"the search for {width} directions")
    chunk = budget.chunk(resources.without(held), trajectory, width)
    curvatures = [_curvature(trajectory, index, kind) for index in sorted(chosen)]
    like = next(iter(curvatures[0].params.values()))
    start = torch.randn(layout.width, width, generator=torch.Generator().manual_seed(0))
    product = start.to(like)
    del start
    for _ in resources.track(range(ROUNDS + 1), ROUNDS + 1, "finding directions"):
        basis = torch.linalg.qr(product)[0]
        product = torch.zeros_like(basis)
        for curvature in curvatures:
            for place in range(0, width, chunk):
                columns = layout.unflatten(basis[:, place : place + chunk].T)
                product[:, place : place + chunk] += layout.flatten(curvature.products(columns)[0]).T
        product /= len(curvatures)
    cost.hvps += search_products(width, len(trajectory))
    # Pick the most curved directions: the eigenvectors of H̄ within the span.
    values, vectors = torch.linalg.eigh(basis.T @ product)
    return (basis @ vectors[:, values.abs().argsort(descending=True)[:rank]]).T


def search_products(width: int, steps: int) -> int:
    """Count the products of a search for this many directions in a run of this many steps.

    >>> search_products(12, 2), search_products(12, 8) == search_products(12, 1000)
    (120, True)
    """
    return (ROUNDS + 1) * width * min(steps, SAMPLES)


def _curvature(trajectory: Trajectory, index: int, kind: type[Curvature]) -> Curvature:
    """Return the curvature at one step; nothing else of the step is kept."""
    recorded = trajectory.recorded_step(index)
    return kind(recorded.task, recorded.params, recorded.batch)
