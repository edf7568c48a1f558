"""Models with an autograd.Function of the old style, against the same model in PyTorch's own operations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leaveout as lo
from leaveout.task.own_functions import transformable


class Swish(torch.autograd.Function):
    """Saves an input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * s * (1 + x * (1 - s))


class Power(torch.autograd.Function):
    """Saves an output and a number, has an input without derivative, and returns two tensors."""

    @staticmethod
    def forward(ctx, x, factor):
        y = torch.exp(factor * x)
        ctx.save_for_backward(y)
        ctx.factor = factor
        return y, x.detach() > 0

    @staticmethod
    def backward(ctx, grad, _):
        (y,) = ctx.saved_tensors
        return grad * ctx.factor * y, None


class Net(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own, self.first, self.last = own, nn.Linear(4, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        x = self.first(x)
        if self.own:
            return self.last(Power.apply(Swish.apply(x), 0.3)[0])
        return self.last(torch.exp(0.3 * nn.functional.silu(x)))


def data(count: int = 12) -> torch.utils.data.TensorDataset:
    order = torch.Generator().manual_seed(count)
    x = torch.randn(count, 4, dtype=torch.float64, generator=order)
    return torch.utils.data.TensorDataset(x, torch.randint(3, (count,), generator=order))


def study(path, own: bool):
    model = Net(own)
    task = lo.Task(model, nn.CrossEntropyLoss(), data())
    optimizer = torch.optim.Adam(model.parameters(), 0.02, eps=1e-3)
    return lo.train(task, optimizer, epochs=2, batch_size=4, seed=0, out=path), task


@pytest.mark.parametrize("method", [lo.SGDIE(), lo.ACC(), lo.ACC("exact"), lo.TracIn(), lo.Replay()], ids=str)
def test_scores_are_those_of_pytorchs_own_operations(method: lo.Estimator, tmp_path) -> None:
    own, plain = (study(tmp_path / str(own), own) for own in (True, False))
    scores, expected = (method.score(*one, data(5), ids=[0, 7]).values for one in (own, plain))
    assert torch.allclose(scores, expected, rtol=1e-8, atol=1e-12)


def test_many_examples_are_computed_side_by_side() -> None:
    assert lo.Task(Net(True), nn.CrossEntropyLoss(), data()).abilities.vmap


def test_outside_nothing_is_changed() -> None:
    before = torch.autograd.Function.apply
    with transformable():
        x = torch.randn(3, requires_grad=True)
        Swish.apply(x).sum().backward()
    assert torch.autograd.Function.apply == before
    assert x.grad is not None
