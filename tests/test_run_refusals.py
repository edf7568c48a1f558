"""What of a training as it happened is refused: settings that mean nothing, and what a record cannot hold."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo
from leaveout.run import kept_batches
from leaveout.task.training_batch import TrainingBatch, take
from refusal import refused


def data() -> TensorDataset:
    order = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(12, 4, generator=order), torch.randint(3, (12,), generator=order))


def net(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), *middle, nn.Linear(5, 3))


def recorded(path, model: nn.Module, *, window: int = 1, **options) -> lo.Run:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lo.Recorder(path, model, optimizer, **options) as recorder:
        for number, (x, y) in enumerate(recorder.watch(DataLoader(data(), 3)), 1):
            (F.cross_entropy(model(x), y) / window).backward()
            if number % window == 0:
                optimizer.step()
                optimizer.zero_grad()
    return lo.open_run(path)


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        ({"statistics": "go"}, "statistics-unknown", "'go'"),
        ({"accumulation": "some"}, "accumulation-unknown", "'some'"),
        ({"accumulation": 0}, "accumulation-unknown", "accumulation=0"),
        ({"clip_norm": 0.0}, "clip-out-of-range", "clip_norm=0.0"),
        ({"clip_value": -1.0}, "clip-out-of-range", "clip_value=-1.0"),
        ({"clip_norm": (1.0, 0.0)}, "clip-out-of-range", "(1.0, 0.0)"),
    ],
)
def test_settings_of_a_task_that_mean_nothing(options, code, named) -> None:
    with refused(lo.InputError, code, named):
        lo.Task(net(), nn.CrossEntropyLoss(), data(), **options)


def test_a_loss_of_three_parts() -> None:
    def loss(out, y):
        losses = F.cross_entropy(out, y, reduction="none")
        return losses, losses, losses

    with refused(lo.InputError, "loss-parts-wrong", "two tensors"):
        lo.Task(net(), loss, data())


def test_steps_with_casts_and_steps_without(tmp_path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for number, (x, y) in enumerate(recorder.watch(DataLoader(data(), 3))):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number == 1):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if number == 1:
            break
    with refused(lo.UnsupportedError, "autocast-changed", "two runs"):
        recorder.finish()


def test_batches_of_which_no_file_can_be_made() -> None:
    with refused(lo.UnsupportedError, "batch-not-keepable", "str"):
        kept_batches.structure({"text": "words"})


def test_layers_of_a_clipped_training(tmp_path) -> None:
    model = net()
    run = recorded(tmp_path / "run", model)
    task = lo.Task(model, nn.CrossEntropyLoss(), data(), clip_norm=1e9)
    with refused(lo.UnsupportedError, "layers-with-clipping", "clip_norm"):
        lo.SGDIE(layers="0.*").score(run, task, data())


def test_a_state_that_was_not_kept(tmp_path) -> None:
    run = recorded(tmp_path / "run", net(), keep=3)
    with refused(lo.RunError, "state-not-kept", "1"):
        run.state(1)


class Noisy(nn.Module):
    """Mixes noise of a permutation of the batch into it: whose draw is where cannot be told."""

    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)[torch.randperm(len(x))] if self.training else x


def test_draws_that_belong_to_no_example_in_a_method_that_looks_at_single_ones(tmp_path) -> None:
    model = net(Noisy())
    run = recorded(tmp_path / "run", model)
    task = lo.Task(model, nn.CrossEntropyLoss(), data())
    lo.SGDIE().score(run, task, data())
    with refused(lo.UnsupportedError, "derivative-not-available", "told apart by example"):
        lo.DVEmb().score(run, task, data())
    shared = TrainingBatch([torch.ones(3, 4)], whole={"0 randn": torch.ones(3)})
    with refused(lo.UnsupportedError, "examples-not-separable", "SGDIE()"):
        take(shared, torch.tensor([0]))


def padded(pairs):
    """Batches whose width depends on their first example's label."""
    x, y = (torch.stack(part) for part in zip(*pairs, strict=True))
    return F.pad(x, (0, int(y[0]))), y


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x[:, :4])


def test_micro_batches_of_several_shapes_in_a_method_that_joins_them(tmp_path) -> None:
    model = Short()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        for number, (x, y) in enumerate(recorder.watch(DataLoader(data(), 2, collate_fn=padded)), 1):
            (F.cross_entropy(model(x), y) / 2).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    task = lo.Task(model, nn.CrossEntropyLoss(), data(), collate=padded)
    run = lo.open_run(tmp_path / "run")
    lo.SGDIE().score(run, task, data())
    with refused(lo.UnsupportedError, "micro-batches-differ", "pad all examples"):
        lo.DVEmb().score(run, task, data())


class Reversed(torch.autograd.Function):
    """Turns the gradient around, as for adversarial training."""

    @staticmethod
    def forward(_ctx, x):
        return x * 1

    @staticmethod
    def backward(_ctx, grad):
        return -grad


class Reversal(nn.Module):
    def forward(self, x):
        return Reversed.apply(x)


@pytest.mark.compared_anew
def test_a_gradient_that_is_not_the_losss_derivative(tmp_path) -> None:
    model = net(Reversal())
    run = recorded(tmp_path / "run", model)
    task = lo.Task(model, nn.CrossEntropyLoss(), data())
    lo.Replay().score(run, task, data(), ids=[0])
    with refused(lo.UnsupportedError, "gradient-not-a-derivative", "Replay()"):
        lo.TracIn().score(run, task, data())
