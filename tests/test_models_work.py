"""Ordinary modules of many kinds go through, end to end."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, TensorDataset

import leaveout as lo
from problems import mostly_full


class TinyTransformer(nn.Module):
    """Embedding, attention, LayerNorm, and an output layer tied to the embedding."""

    def __init__(self, tokens: int = 7, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.register_buffer("position", torch.linspace(0, 1, 5).unsqueeze(1).expand(5, width).clone())
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layer(self.embed(tokens) + self.position))[:, -1])


def record(tmp_path, model, loss, train, optimizer, forward=None, collate=None, epochs=3):
    loader = DataLoader(train, batch_size=4, shuffle=True, collate_fn=collate)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    task = lo.Task(model, loss, train, forward=forward, collate=collate)
    for _ in range(epochs):
        for batch in recorder.watch(loader):
            optimizer.zero_grad()
            outputs, targets = task.objective.outputs(task.parameters(), batch)
            loss(outputs, targets).mean().backward()
            optimizer.step()
    return recorder.finish(), task


def check_all(run, task, query, tolerance=1e-8):
    """Forward equals backward for every method, and SGD-IE is the derivative of the replayed run."""
    for method in (lo.TracIn, lo.SGDIE, partial(lo.ACC, "exact")):
        forward, backward = (
            method(direction=d).score(run, task, query, queries="each") for d in ("forward", "backward")
        )
        assert (forward.values - backward.values).abs().max() <= tolerance * forward.values.abs().max()
    up, down = (lo.Replay(weight=1 + e).score(run, task, query, queries="each").values for e in (1e-4, -1e-4))
    slope = lo.SGDIE().score(run, task, query, queries="each").values
    assert (slope + (up - down) / 2e-4).abs().max() <= 1e-5 * slope.abs().max()
    truth, acc = lo.Replay().score(run, task, query), lo.ACC("exact", readout="exact").score(run, task, query)
    assert lo.metrics.kendall(acc.mean(), truth.mean()) > 0.8


@pytest.mark.parametrize("kind", mostly_full([torch.optim.SGD, torch.optim.AdamW], torch.optim.SGD))
def test_a_tiny_transformer(tmp_path, kind):
    model = TinyTransformer().double()
    tokens = torch.randint(7, (12, 5))
    train = TensorDataset(tokens, tokens[:, 0])
    rate = 0.03 if kind is torch.optim.SGD else 0.003
    run, task = record(tmp_path, model, nn.CrossEntropyLoss(), train, kind(model.parameters(), lr=rate))
    check_all(run, task, TensorDataset(tokens[:3].flip(1), tokens[:3, 1]))
    assert lo.verify(lo.ACC("exact").score(run, task, train), run, task, train, replays=12).random.count == 6


def test_frozen_parameters_and_a_bare_first_layer(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].weight.requires_grad_(False)
    x = torch.randn(9, 3, dtype=torch.float64)
    train = TensorDataset(x, (x[:, 0] > 0).long())
    trained = [p for p in model.parameters() if p.requires_grad]
    run, task = record(tmp_path, model, nn.CrossEntropyLoss(), train, torch.optim.SGD(trained, lr=0.2, momentum=0.5))
    assert "0.weight" not in run.rule.groups
    check_all(run, task, TensorDataset(x[:2] + 0.1, torch.tensor([0, 1])))


class Products(TorchDispatchMode):
    """Notes how many numbers the factors and results of matrix products have, but for a weight itself."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.sizes = weight.untyped_storage().data_ptr(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            others = [one for one in (*args, result) if isinstance(one, torch.Tensor)]
            self.sizes |= {t.numel() for t in others if t.untyped_storage().data_ptr() != self.weight}
        return result


@pytest.mark.parametrize("frozen", [True, False])
def test_products_that_recur_have_no_gradient_and_no_tangent_of_a_frozen_weight(tmp_path, frozen):
    model = nn.Sequential(nn.Linear(3, 37), nn.Tanh(), nn.Linear(37, 41), nn.Tanh(), nn.Linear(41, 2)).double()
    model[2].weight.requires_grad_(not frozen)
    x = torch.randn(16, 3, dtype=torch.float64)
    train = TensorDataset(x, (x[:, 0] > 0).long())
    trained = [p for p in model.parameters() if p.requires_grad]
    run, task = record(tmp_path, model, nn.CrossEntropyLoss(), train, torch.optim.SGD(trained, lr=0.1), epochs=2)
    lo.SGDIE().score(run, task, train)  # what is compared and traced once
    with Products(model[2].weight) as products:
        lo.SGDIE().score(run, task, train)
    assert (37 * 41 in products.sizes) is not frozen


class DictSet(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)[i].sin()
        return {"x": x, "scale": 1 + x[:1], "labels": x.sum().sign()}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (scale * self.inner(x).tanh())[:, 0]


def test_dict_batches_and_a_callable_loss(tmp_path):
    model = TwoInputs().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run, task = record(tmp_path, model, lambda out, y: (out - y) ** 2, DictSet(), optimizer)
    check_all(run, task, DictSet())


def test_a_forward_rule_of_ones_own(tmp_path):
    model = TwoInputs().double()
    rule = lambda m, batch: (m.inner(batch["x"])[:, 0], batch["labels"])  # noqa: E731
    run, task = record(
        tmp_path, model, nn.MSELoss(), DictSet(), torch.optim.SGD(model.parameters(), lr=0.1), forward=rule
    )
    check_all(run, task, DictSet())


def test_a_loss_without_curvature(tmp_path):
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    run, task = record(tmp_path, model, nn.L1Loss(), TensorDataset(x, x[:, 0]), optimizer)
    query = TensorDataset(x + 0.1, x[:, 1])
    # With no Hessian anywhere, nothing is left to correct; only momentum carries the example's effect on.
    expected = lo.SGDIE().score(run, task, query, queries="each").values
    assert expected.abs().max() > 1e-3
    for method in (lo.ACC(), lo.ACC("exact"), lo.ACC("exact", direction="backward"), lo.SGDIE(direction="forward")):
        values = method.score(run, task, query, queries="each").values
        assert (values - expected).abs().max() <= 1e-12


class Recurrent(nn.Module):
    """An LSTM, whose fused kernel has no batching rule on every backend."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])[:, 0]


@pytest.mark.full
def test_a_recurrent_network(tmp_path):
    model = Recurrent().double()
    x = torch.randn(8, 4, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    run, task = record(tmp_path, model, nn.MSELoss(), TensorDataset(x, x[:, 0, 0]), optimizer, epochs=2)
    check_all(run, task, TensorDataset(x[:3].flip(0), x[:3, 0, 1]))


@pytest.mark.full
def test_the_loop_stands_in_for_vmap(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1), nn.Flatten(0)).double()
    x = torch.randn(7, 3, dtype=torch.float64)
    train = TensorDataset(x, x[:, 0])
    run, task = record(tmp_path, model, nn.MSELoss(), train, torch.optim.Adam(model.parameters(), lr=0.05))
    looped = lo.Task(model, nn.MSELoss(), train)
    looped = looped.of(looped.objective.able(looped.objective.abilities._replace(vmap=False, forward=False)))
    for method in (lo.TracIn(), lo.SGDIE(), lo.ACC("exact"), lo.ACC("exact", direction="backward"), lo.Replay()):
        a, b = (method.score(run, t, train, queries="each").values for t in (task, looped))
        assert (a - b).abs().max() <= 1e-10 * a.abs().max()
