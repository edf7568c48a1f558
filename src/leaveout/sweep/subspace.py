"""The directions in which a run's curvature is largest."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout._util.trees import PARAM, sum_of
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

    By subspace iteration ``Q ← orth(H̄ Q)`` from a seeded random start, with a few directions more than are kept.
    """
    count = min(len(trajectory), SAMPLES)
    chosen = {round(i) for i in torch.linspace(0, len(trajectory) - 1, count).tolist()}
    recorded_steps = [trajectory.recorded_step(index) for index in sorted(chosen)]
    like = next(iter(recorded_steps[0].before[PARAM].values()))
    width = min(rank + EXTRA, layout.width)
    start = torch.randn(layout.width, width, generator=torch.Generator().manual_seed(0))
    chunk = budget.chunk(resources, trajectory, width)
    curvatures = [kind(trajectory.task, recorded.params, recorded.batch, chunk) for recorded in recorded_steps]
    product = start.to(like)
    for _ in resources.track(range(ROUNDS + 1), ROUNDS + 1, "finding directions"):
        basis = torch.linalg.qr(product)[0]
        columns = layout.unflatten(basis.T)
        product = sum_of(layout.flatten(curvature.products(columns)[0]).T for curvature in curvatures) / len(
            recorded_steps
        )
    cost.hvps += (ROUNDS + 1) * width * len(recorded_steps)
    # Which of the directions are curved most: the eigenvectors of H̄ within their span.
    values, vectors = torch.linalg.eigh(basis.T @ product)
    return (basis @ vectors[:, values.abs().argsort(descending=True)[:rank]]).T
