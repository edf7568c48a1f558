"""What a user may add outside the package: a curvature of one's own, against dense matrices."""

import torch
from torch import nn
from torch.func import functional_call, hessian
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.diff.outer import GaussNewton

RATE, DAMPING = 0.3, 0.1


class Damped(GaussNewton):
    """C + λ in every batch."""

    def pull(self, vectors):
        product = super().pull(vectors)
        return product._replace(curved={n: own + DAMPING * vectors[n] for n, own in product.curved.items()})

    def push(self, vectors, weights, added):
        changes, gradient = super().push(vectors, weights, added)
        return {n: own + DAMPING * vectors[n] for n, own in changes.items()}, gradient


def test_a_curvature_of_ones_own_carries_vectors(tmp_path):
    """δ ← (I − α (C + λ))·δ + (α/|Z|) g; for a linear model C is the Hessian, which is written out here."""
    order = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, dtype=torch.float64, generator=order), torch.randint(2, (12,), generator=order)
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    data, query = TensorDataset(x, y), TensorDataset(x[:5] + 0.3, y[:5])
    task, shapes = lo.Task(model, nn.CrossEntropyLoss(), data), {n: p.shape for n, p in model.named_parameters()}
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=RATE), 3, 4, 0, tmp_path / "run", keep="all")

    def loss(flat, x, y):
        parts = flat.split([shape.numel() for shape in shapes.values()])
        params = {n: part.view(shape) for (n, shape), part in zip(shapes.items(), parts, strict=True)}
        return cross_entropy(functional_call(model, params, (x,)), y)

    def flat(state):
        return torch.cat([state["param"][name].flatten() for name in shapes])

    moved = torch.zeros(12, 8, dtype=torch.float64)
    for i in range(len(run)):
        at, ids = flat(run.state(i)), run.record(i).ids
        moved = moved - RATE * moved @ (hessian(loss)(at, x[ids], y[ids]) + DAMPING * torch.eye(8, dtype=torch.float64))
        for k in ids.tolist():
            moved[k] += RATE / len(ids) * torch.func.grad(loss)(at, x[k : k + 1], y[k : k + 1])
    truth = moved @ torch.func.grad(loss)(flat(run.final()), *query.tensors)
    for options in ({}, {"displacements": True}):  # backward by pull, forward by push
        scores = lo.DVEmb(curvature=Damped).score(run, task, query, **options)
        assert scores.method == "DVEmb(Damped)"
        torch.testing.assert_close(scores.mean(), truth, rtol=1e-9, atol=1e-12)
