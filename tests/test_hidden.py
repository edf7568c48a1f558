"""What hides a dependence from the gradient on a few examples only: scores are right, or refused.

The scores are compared with finite differences of retraining: a plain loop with a little more, or less, of one example.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leaveout as lo
from refusal import refused

pytestmark = pytest.mark.compared_anew

N, FAR = 60, 41
BATCHES = [list(range(start, start + 6)) for start in range(0, N, 6)]
RATE, ROWS = 0.5, [FAR, 40, 3]


class Reversed(torch.autograd.Function):
    """A gradient-reversal layer."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, grad):
        return -grad


def clamped(h: Tensor, _far: Tensor) -> Tensor:
    return h / h.detach().norm(dim=1, keepdim=True).clamp_min(1)


def clamped_without_grad(h: Tensor, _far: Tensor) -> Tensor:
    with torch.no_grad():
        size = h.norm(dim=1, keepdim=True).clamp_min(1)
    return h / size


def masked(h: Tensor, far: Tensor) -> Tensor:
    return torch.where(far, h * h.detach(), h)


def branched(h: Tensor, far: Tensor) -> Tensor:
    return torch.where(far, h * h.data, h) if bool(far.any()) else h


def shifted(h: Tensor, _far: Tensor) -> Tensor:
    """The stop has no effect, wherever the example lies."""
    top = h.max(1, keepdim=True).values.detach()
    return h - ((h - top).exp().sum(1, keepdim=True).log() + top)


def noted(h: Tensor, _far: Tensor) -> Tensor:
    h.detach().norm()
    return h * (h.detach() > 0)


def reversed_if_far(h: Tensor, far: Tensor) -> Tensor:
    return torch.where(far, Reversed.apply(h), h)


def branched_reversal(h: Tensor, far: Tensor) -> Tensor:
    return torch.where(far, Reversed.apply(h), h) if bool(far.any()) else h


FOLLOWED = [clamped, clamped_without_grad, masked, branched]
HARMLESS = [shifted, noted]
REVERSALS = [reversed_if_far, branched_reversal]


class Net(nn.Module):
    """An example is far if its first feature is above 3."""

    def __init__(self, middle) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.middle, self.first, self.last = middle, nn.Linear(3, 4, bias=False), nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(0.3 * self.first(x), x[:, :1] > 3))


def data(count: int, far: int | None) -> TensorDataset:
    order = torch.Generator().manual_seed(count)
    x = torch.randn(count, 3, dtype=torch.float64, generator=order).clamp(-1, 1)
    if far is not None:
        x[far] = torch.tensor([9.0, -7.0, 8.0])
    return TensorDataset(x, torch.randint(2, (count,), generator=order))


TRAIN, QUERY = data(N, FAR), data(20, None)
FAR_QUERY = data(20, 11)


def retrained(middle, weights: Tensor, query: TensorDataset) -> Tensor:
    """The query loss after a plain loop with these weights of the examples."""
    model = Net(middle)
    for ids in map(torch.tensor, BATCHES):
        x, y = TRAIN[ids]
        loss = (weights[ids] * F.cross_entropy(model(x), y, reduction="none")).mean()
        with torch.no_grad():
            for param, grad in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
                param -= RATE * grad
    return F.cross_entropy(model(query.tensors[0]), query.tensors[1]).detach()


def truth(middle, query: TensorDataset, step: float = 1e-4) -> Tensor:
    """SGD-IE's scores, by differences."""
    rows = []
    for row in ROWS:
        side = torch.zeros(N, dtype=torch.float64)
        side[row] = step
        rows.append((retrained(middle, 1 - side, query) - retrained(middle, 1 + side, query)) / (2 * step))
    return torch.stack(rows)


truth = functools.cache(truth)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run by its model, made once."""

    def make(middle):
        model, path = Net(middle), tmp_path_factory.mktemp("runs") / "run"
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        with lo.Recorder(path, model, optimizer) as recorder:
            for ids in map(torch.tensor, BATCHES):
                optimizer.zero_grad()
                F.cross_entropy(model(TRAIN[ids][0]), TRAIN[ids][1]).backward()
                recorder.step(ids, list(TRAIN[ids]))
                optimizer.step()
        return lo.open_run(path), model

    return functools.cache(make)


@pytest.mark.parametrize("middle", FOLLOWED + HARMLESS)
@pytest.mark.parametrize("method", [lo.SGDIE(), lo.SGDIE(direction="forward")])
def test_one_example_of_sixty_that_is_far(method, middle, recorded) -> None:
    run, model = recorded(middle)
    scores = method.score(run, lo.Task(model, nn.CrossEntropyLoss(), TRAIN), QUERY, ids=ROWS).values[:, 0]
    torch.testing.assert_close(scores, truth(middle, QUERY), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("middle", [*FOLLOWED, *HARMLESS])
def test_one_query_of_twenty_that_is_far(middle, recorded) -> None:
    run, model = recorded(middle)
    scores = lo.SGDIE().score(run, lo.Task(model, nn.CrossEntropyLoss(), TRAIN), FAR_QUERY, ids=ROWS).values[:, 0]
    torch.testing.assert_close(scores, truth(middle, FAR_QUERY), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("middle", FOLLOWED)
def test_methods_that_take_the_curvature_for_symmetric_refuse(middle, recorded) -> None:
    run, model = recorded(middle)
    task = lo.Task(model, nn.CrossEntropyLoss(), TRAIN)
    for method in (lo.ACC(lo.Subspace(2)), lo.ACC("free"), lo.InfluenceFunction()):
        with refused(lo.UnsupportedError, "curvature-not-symmetric"):
            method.score(run, task, QUERY, ids=ROWS)


@pytest.mark.parametrize("middle", HARMLESS)
def test_a_stop_without_an_effect_costs_no_method(middle, recorded) -> None:
    run, model = recorded(middle)
    task = lo.Task(model, nn.CrossEntropyLoss(), TRAIN)
    assert task.objective.abilities.symmetric
    for method in (lo.ACC(lo.Subspace(2)), lo.ACC("free")):
        assert method.score(run, task, QUERY, ids=ROWS).values.isfinite().all()


@pytest.mark.parametrize("middle", REVERSALS)
def test_a_gradient_of_its_own_on_one_example_is_refused(middle, recorded) -> None:
    run, model = recorded(middle)
    task = lo.Task(model, nn.CrossEntropyLoss(), TRAIN)
    for method in (lo.SGDIE(), lo.ACC("exact"), lo.TracIn()):
        with refused(lo.UnsupportedError, "gradient-not-a-derivative", "Reversed"):
            method.score(run, task, QUERY, ids=ROWS)
    assert lo.Replay().score(run, task, QUERY, ids=ROWS).values.isfinite().all()
