"""What rows without examples go through: the batch's curvature with weights, against a sum over single examples."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.diff.hessian import Flat, Hessian
from leaveout.diff.outer import Fisher, GaussNewton
from leaveout.task.execution import Chunks

SHAPES = {
    "plain": (None, nn.CrossEntropyLoss()),
    # Sequences of seven, so that a first dimension of seven tells nothing.
    "examples second": (
        lambda model, batch: (model(batch[0]).transpose(0, 1), batch[1]),
        lambda out, y: cross_entropy(out.permute(1, 2, 0), y, reduction="none").mean(1),
    ),
    "all in one": (
        lambda model, batch: (model(batch[0]).flatten(0, 1), batch[1]),
        lambda out, y: cross_entropy(out, y.flatten(), reduction="none").view(y.shape).mean(1),
    ),
}


@functools.cache
def task(shape):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    forward, loss = SHAPES[shape]
    more = () if forward is None else (7,)
    data = TensorDataset(torch.randn(7, *more, 4, dtype=torch.float64), torch.randint(3, (7, *more)))
    return lo.Task(
        model, loss, data, l2=0.1, check=False, trace=False, **({} if forward is None else {"forward": forward})
    )


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [Hessian, GaussNewton, Fisher, Flat])
def test_products_are_sums_over_examples(kind, shape, chunk, forward):
    """(1/|Z|) Σ (w_z C(z)·v + ẇ_z g(z)) for each row's own v, w and ẇ; with w = 1 and ẇ = 0, and ⟨v, g(z)⟩/|Z|."""
    given = task(shape)
    abilities = given.objective.abilities._replace(forward=forward)
    objective = given.objective.able(abilities).chunked(Chunks(chunk))
    params = {name: p.detach() for name, p in given.parameters().items()}
    batch = given.read(range(7))
    vectors = {name: torch.randn(3, *p.shape, dtype=p.dtype) for name, p in params.items()}
    weights, added = torch.randn(2, 3, 7, dtype=torch.float64)
    operator = kind(objective, params, batch)
    found, gradient = operator.push(vectors, weights, added)
    products, reads, again, _ = operator.pull(vectors)
    for row in range(3):
        gradients, curved = operator.example_products(
            batch, {name: t[row].expand(7, *t[row].shape) for name, t in vectors.items()}
        )
        for name in params:
            wanted = torch.tensordot(weights[row], curved[name], 1) + torch.tensordot(added[row], gradients[name], 1)
            torch.testing.assert_close(found[name][row], wanted / 7, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(products[name][row], curved[name].mean(0), rtol=1e-10, atol=1e-12)
        read = sum((gradients[name] * vectors[name][row]).flatten(1).sum(1) for name in params)
        torch.testing.assert_close(reads[row], read / 7, rtol=1e-10, atol=1e-12)
    if kind is not Flat:  # the gradient came with it
        assert gradient is not None
        assert again is not None
    mean = {name: t.mean(0) for name, t in operator.example_gradients(batch).items()}
    for whole in filter(None, (gradient, again, operator.gradient())):
        for name in params:
            torch.testing.assert_close(whole[name], mean[name], rtol=1e-10, atol=1e-12)


class Spare(nn.Module):
    """A parameter that the loss does not use."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 3), nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"momentum": 0.5, "nesterov": True}])
def test_a_parameter_that_the_loss_does_not_use_moves_on_its_own(tmp_path, options):
    """Its derivative is one zero for all rows, which each row's own step may not be written into."""
    torch.manual_seed(0)
    model = Spare().double()
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        for ids in (*torch.arange(12).split(4), *torch.arange(12).split(4)):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            mse_loss(model(x[ids]), y[ids]).backward()
            recorder.step(ids, [x[ids], y[ids]])
            optimizer.step()
    data = TensorDataset(x, y)
    run, given = lo.open_run(tmp_path / "run"), lo.Task(model, nn.MSELoss(), data)
    forward, backward = (
        lo.ACC("exact", direction=direction).score(run, given, data).values for direction in ("forward", "backward")
    )
    torch.testing.assert_close(forward, backward, rtol=1e-10, atol=1e-14)
    plain, back = (
        lo.SGDIE(direction=direction).score(run, given, data).values for direction in ("forward", "backward")
    )
    torch.testing.assert_close(plain, back, rtol=1e-10, atol=1e-14)
    exact, truth = (e.score(run, given, data).values for e in (lo.ACC("exact", "exact"), lo.Replay()))
    torch.testing.assert_close(exact, truth, rtol=1e-10, atol=1e-14)  # the loss is quadratic
