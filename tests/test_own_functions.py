"""Models with autograd functions of their own, against the same model in PyTorch's own operations."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import leaveout as lo
from leaveout.task.rewrites.own_functions import transformable
from refusal import refused


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


class Written(torch.autograd.Function):
    """Writes into its input, and saves it: tanh."""

    @staticmethod
    def forward(ctx, x):
        x.tanh_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class NewlyWritten(torch.autograd.Function):
    """The same with a setup_context, of two inputs, of which the second is written into."""

    @staticmethod
    def forward(factor, x):
        return x.mul_(factor).tanh_()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[1])
        ctx.factor = inputs[0]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return None, ctx.factor * grad * (1 - y * y)


class Inner(torch.autograd.Function):
    """Keeps a graph of its own for its backward pass, as implicit layers do."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.own = x.detach().requires_grad_()
            ctx.out = ctx.own.square()
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, grad):
        return torch.autograd.grad(ctx.out, ctx.own, grad)[0]


def noted(ctx, x):
    ctx.mark_dirty(x)


class Hidden(torch.autograd.Function):
    """Writes into its input, and does not say so itself."""

    @staticmethod
    def forward(ctx, x):
        noted(ctx, x)
        return x.mul_(2)

    @staticmethod
    def backward(_ctx, grad):
        return 2 * grad


class Raised(torch.autograd.Function):
    """Has an argument with a default."""

    @staticmethod
    def forward(ctx, x, power=2):
        ctx.save_for_backward(x)
        ctx.power = power
        return x**power

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return ctx.power * x ** (ctx.power - 1) * grad, None


raised = Raised.apply


def old_style(x):
    return Power.apply(Swish.apply(x), 0.3)[0]


def written(x):
    """The input is used again after it was written into."""
    x = x * 1
    return Written.apply(x) + 0.5 * x


def newly_written(x):
    x = x * 1
    NewlyWritten.apply(0.7, x)
    return x


def checkpointed(reentrant: bool):
    return lambda x: checkpoint(lambda y: torch.tanh(y * y), x, use_reentrant=reentrant)


OWN = {
    "under another name": (lambda x: raised(x) - 0.1 * raised(x, 3), lambda x: x**2 - 0.1 * x**3),
    "old style": (old_style, lambda x: torch.exp(0.3 * nn.functional.silu(x))),
    "writes into its input": (written, lambda x: 1.5 * torch.tanh(x)),
    "writes into its input, setup_context": (newly_written, lambda x: torch.tanh(0.7 * x)),
    "checkpointed": (checkpointed(False), lambda x: torch.tanh(x * x)),
    "checkpointed, reentrant": (checkpointed(True), lambda x: torch.tanh(x * x)),
}
"""Functions of a model's own, and what they compute in PyTorch's own operations."""


class Net(nn.Module):
    def __init__(self, middle) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.middle, self.first, self.last = middle, nn.Linear(4, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def data(count: int = 12) -> torch.utils.data.TensorDataset:
    order = torch.Generator().manual_seed(count)
    x = torch.randn(count, 4, dtype=torch.float64, generator=order)
    return torch.utils.data.TensorDataset(x, torch.randint(3, (count,), generator=order))


def study(path, middle):
    """A recorded loop and its task."""
    model = Net(middle)
    optimizer = torch.optim.Adam(model.parameters(), 0.02, eps=1e-3)
    with lo.Recorder(path, model, optimizer) as recorder:
        order = torch.Generator().manual_seed(0)
        loader = torch.utils.data.DataLoader(data(), 4, shuffle=True, generator=order)
        for _ in range(2):
            for x, y in recorder.watch(loader):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    return lo.open_run(path), lo.Task(model, nn.CrossEntropyLoss(), data())


METHODS = [lo.SGDIE(), lo.ACC(), lo.ACC("exact"), lo.TracIn(), lo.Replay()]


@pytest.mark.parametrize("name", OWN)
def test_scores_are_those_of_pytorchs_own_operations(name: str, tmp_path) -> None:
    own, plain = (study(tmp_path / str(i), middle) for i, middle in enumerate(OWN[name]))
    for method in METHODS:
        scores, expected = (method.score(*one, data(5), ids=[0, 7]).values for one in (own, plain))
        assert torch.allclose(scores, expected, rtol=1e-8, atol=1e-12), method


@pytest.mark.parametrize("name", OWN)
def test_many_examples_are_computed_side_by_side(name: str) -> None:
    assert lo.Task(Net(OWN[name][0]), nn.CrossEntropyLoss(), data()).objective.abilities.vmap


def looked_up():
    """What ``apply`` looks up when it is called."""
    module, kinds = torch.autograd.function, (torch.autograd.Function, torch.utils.checkpoint.CheckpointFunction)
    named = [getattr(module, name, None) for name in ("custom_function_call", "inspect", "_bind_default_args")]
    return named, [(kind.apply, kind.setup_context) for kind in kinds]


def test_outside_nothing_is_changed() -> None:
    before = looked_up()
    with transformable():
        x = torch.randn(3, requires_grad=True)
        Swish.apply(x).sum().backward()
    assert looked_up() == before
    assert x.grad is not None


def test_the_last_of_several_threads_puts_pytorchs_own_back() -> None:
    before = looked_up()
    first, second = transformable(), transformable()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    x = torch.ones(3, dtype=torch.float64)
    assert torch.allclose(torch.func.grad(lambda y: Swish.apply(y).sum())(x), torch.full_like(x, 0.92767052))
    second.__exit__(None, None, None)
    assert looked_up() == before


@pytest.mark.parametrize("function", [Inner, Hidden])
def test_what_cannot_be_transformed_is_said_after_the_first_step(function, tmp_path) -> None:
    model = Net(lambda x: function.apply(x * 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer, on_problem="stop")
    x, y = next(iter(recorder.watch(torch.utils.data.DataLoader(data(), 4))))
    nn.functional.cross_entropy(model(x), y).backward()
    with refused(lo.UnsupportedError, "model-not-supported", function.__name__, "setup_context"):
        optimizer.step()
    assert len(recorder.finish()) == 1


class Counting(Net):
    """Counts its forward passes, and draws in evaluation mode too: nothing of it may be called twice."""

    def __init__(self, middle) -> None:
        super().__init__(middle)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x + 0.1 * torch.rand(()))


def test_looking_at_the_first_pass_changes_no_bit_of_the_training(tmp_path) -> None:
    ends = []
    for path in (tmp_path / "run", None):
        model = Counting(written)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        recorder = None if path is None else lo.Recorder(path, model, optimizer)
        torch.manual_seed(3)
        for ids in ([0, 1, 2], [3, 4, 5]):
            x, y = data()[ids]
            if recorder is not None:
                recorder.step(ids)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if recorder is not None:
            recorder.finish()
        ends.append((model.calls, [param.detach().clone() for param in model.parameters()]))
    (calls, first), (others, second) = ends
    assert calls == others
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
