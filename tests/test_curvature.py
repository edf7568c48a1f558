"""What rows without examples go through: the batch's curvature with weights, against a sum over single examples."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.curvature import Fisher, Flat, GaussNewton, Hessian


def task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = TensorDataset(torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,)))
    return lo.Task(model, nn.CrossEntropyLoss(), data, l2=0.1)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("kind", [Hessian, GaussNewton, Fisher, Flat])
def test_weighted_changes_are_sums_over_examples(kind, chunk, forward):
    """(1/|Z|) Σ (w_z C(z)·v + ẇ_z g(z)) for each row's own v, w and ẇ."""
    given = task()
    if not forward:
        given.abilities = given.abilities._replace(forward=False)
    params = {name: p.detach() for name, p in given.parameters().items()}
    batch = given.read(range(7))
    vectors = {name: torch.randn(5, *p.shape, dtype=p.dtype) for name, p in params.items()}
    weights, added = torch.randn(2, 5, 7, dtype=torch.float64)
    curvature = kind(given, params, batch, chunk)
    found = curvature.changes(vectors, weights, added)
    for row in range(5):
        gradients, curved = curvature.own(batch, {name: t[row].expand(7, *t[row].shape) for name, t in vectors.items()})
        for name in params:
            wanted = torch.tensordot(weights[row], curved[name], 1) + torch.tensordot(added[row], gradients[name], 1)
            torch.testing.assert_close(found[name][row], wanted / 7, rtol=1e-10, atol=1e-12)
    if kind is not Flat:  # the gradient came with it
        assert curvature.has_gradient
    mean = {name: t.mean(0) for name, t in curvature.gradients(batch).items()}
    for name in params:
        torch.testing.assert_close(curvature.gradient[name], mean[name], rtol=1e-10, atol=1e-12)
