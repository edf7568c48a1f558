"""Loops in which features meet, each written once: recorded as a user has it, and plainly with the examples' weights.

The plain loop multiplies the losses by the weights; nothing else in it differs, and nothing of leaveout is in it.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo
from refusal import refused

LEFT_OUT = [0, 7]
STAY = {"statistics": "stay"}


def data(count: int, seed: int) -> TensorDataset:
    order = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, dtype=torch.float64, generator=order)
    return TensorDataset(x, torch.randint(3, (count,), generator=order), torch.arange(count))


TRAIN, QUERY = data(20, 0), data(6, 9)


class Loop:
    """One way of training. ``weights`` is None in the loop that is recorded."""

    task: dict = {}  # noqa: RUF012 - never written to

    def model(self) -> nn.Module:
        return self.net(nn.Tanh())

    def net(self, *middle: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 6), *middle, nn.Linear(6, 3)).double()

    def optimizer(self, params) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, 0.1, momentum=0.9)

    def losses(self, out, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="none")

    def forward(self, model: nn.Module, batch) -> tuple:
        return model(batch[0]), batch[1]

    def loss(self, model: nn.Module, batch, weights: Tensor | None) -> Tensor:
        losses = self.losses(*self.forward(model, batch))
        return losses.mean() if weights is None else (losses * weights[batch[2]]).sum() / len(losses)

    def epoch(self, model, optimizer, loader, weights) -> None:
        for batch in loader:
            optimizer.zero_grad()
            self.loss(model, batch, weights).backward()
            optimizer.step()

    def train(self, weights: Tensor | None = None, path=None, **options):
        """Return the trained model, and the run if a path was given."""
        model = self.model().train()
        optimizer = self.optimizer(model.parameters())
        loader = DataLoader(TRAIN, 4, shuffle=True, generator=torch.Generator().manual_seed(0))
        recorder = None
        if path is not None:
            recorder = lo.Recorder(path, model, optimizer, **options)
            loader = recorder.watch(loader)
        torch.manual_seed(7)
        with recorder or nullcontext():
            for _ in range(2):
                self.epoch(model, optimizer, loader, weights)
            return model, recorder and recorder.finish()

    def query_loss(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(self.losses(*self.forward(model.eval(), QUERY.tensors)).mean())


class AmsgradOff(Loop):
    """AMSGrad is on in the first and the last steps only."""

    def optimizer(self, params):
        return torch.optim.Adam(params, 0.02, eps=1e-3, amsgrad=True)

    def epoch(self, model, optimizer, loader, weights):
        for number, batch in enumerate(loader):
            optimizer.param_groups[0]["amsgrad"] = number != 2
            super().epoch(model, optimizer, [batch], weights)


class StillStatistics(Loop):
    """BatchNorm normalises by the batch and leaves its running statistics alone."""

    task = STAY

    def model(self):
        return self.net(nn.BatchNorm1d(6, momentum=0.0), nn.Tanh())


class Synchronised(Loop):
    """SyncBatchNorm in one process is BatchNorm."""

    task = STAY

    def model(self):
        return self.net(nn.SyncBatchNorm(6), nn.Tanh())


class Watched(Loop):
    """Hooks that look at gradients, as those that log them do."""

    def model(self):
        model = self.net(nn.Tanh())
        model[1].register_full_backward_hook(lambda *_: None)
        model[2].register_full_backward_pre_hook(lambda *_: None)
        model[0].weight.register_hook(lambda _: None)
        return model


class TwoOutputs(Loop):
    """Two passes of the same examples with different dropout, whose outputs are compared; BatchNorm sees both."""

    task = STAY

    def model(self):
        return self.net(nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, model, batch):
        return (model(batch[0]), model(batch[0])), batch[1]

    def losses(self, out, y):
        one, other = out
        apart = (one - other).square().sum(1)
        return F.cross_entropy(one, y, reduction="none") + F.cross_entropy(other, y, reduction="none") + apart


class Checkpointed(Loop):
    """A checkpointed layer with dropout, whose forward pass is repeated in the backward pass."""

    def model(self):
        class Net(nn.Module):
            def __init__(self, body: nn.Module) -> None:
                super().__init__()
                self.first, self.last = body[:3], body[3]

            def forward(self, x):
                return self.last(checkpoint(self.first, x, use_reentrant=False))

        return Net(self.net(nn.Tanh(), nn.Dropout(0.3)))


class LeftOver(Loop):
    """Windows of two batches, where an epoch has five: the last one's gradient is part of the next epoch's first step.

    After the last step there is one more pass, which moves BatchNorm's statistics; the run ends at the step.
    """

    task = STAY | {"accumulation": 2}
    stop: int | None = None

    def model(self):
        return self.net(nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3))

    def optimizer(self, params):
        return torch.optim.AdamW(params, 0.02, eps=1e-3)

    def epoch(self, model, optimizer, loader, weights):
        for number, batch in enumerate(loader):
            (self.loss(model, batch, weights) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                self.ended = copy.deepcopy(model.state_dict())
                if self.stop == optimizer.state[model[0].weight]["step"]:
                    raise KeyboardInterrupt

    def query_loss(self, model):
        model.load_state_dict(self.ended)
        return super().query_loss(model)


class PassedOver(LeftOver):
    """The same, but the gradient of the last batch is thrown away; what its pass did to the statistics remains."""

    def epoch(self, model, optimizer, loader, weights):
        super().epoch(model, optimizer, loader, weights)
        optimizer.zero_grad()


class SpectralNorm(Loop):
    """A weight divided by its largest singular value, which is followed by buffers that every pass writes to."""

    def model(self):
        model = self.net(nn.Tanh())
        parametrizations.spectral_norm(model[0])
        return model


LOOPS = {one.__name__: one for one in (*Loop.__subclasses__(), PassedOver)}
NOT_DIFFERENTIATED = ("SpectralNorm",)


@pytest.fixture(scope="module", params=LOOPS)
def loop(request, tmp_path_factory):
    """A loop, its run, its task."""
    one = LOOPS[request.param]()
    model, run = one.train(path=tmp_path_factory.mktemp("loop") / "run")
    return one, run, lo.Task(model, one.losses, TRAIN, forward=one.forward, **one.task)


def plain(loop: Loop, example: int, weight: float) -> float:
    """The query loss after a plain training in which one example has this weight."""
    weights = torch.ones(len(TRAIN), dtype=torch.float64)
    weights[example] = weight
    return loop.query_loss(loop.train(weights)[0])


def test_neither_recording_nor_the_task_changes_a_bit(loop) -> None:
    one, _, task = loop
    expected = one.train()[0].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in task.model.state_dict().items())


def test_replay_is_the_plain_loop_with_weight_zero(loop) -> None:
    one, run, task = loop
    scores = lo.Replay().score(run, task, QUERY, ids=LEFT_OUT).values.flatten()
    truth = [plain(one, k, 0.0) - plain(one, k, 1.0) for k in LEFT_OUT]
    assert scores.tolist() == pytest.approx(truth, rel=1e-9, abs=1e-12)


def test_sgdie_is_the_derivative_in_the_weight(loop) -> None:
    one, run, task = loop
    if type(one).__name__ in NOT_DIFFERENTIATED:
        with refused(lo.UnsupportedError, "task-not-supported", "Replay()"):  # its power iteration stops gradients
            lo.SGDIE().score(run, task, QUERY)
        return
    scores = lo.SGDIE().score(run, task, QUERY, ids=LEFT_OUT).values.flatten()
    h = 1e-4
    truth = [(plain(one, k, 1 - h) - plain(one, k, 1 + h)) / (2 * h) for k in LEFT_OUT]
    assert scores.tolist() == pytest.approx(truth, rel=1e-5, abs=1e-5 * max(map(abs, truth)))


def test_exact_acc_of_one_step_is_the_real_effect(loop) -> None:
    """Over one step there is nothing to linearise."""
    one, run, task = loop
    if type(one).__name__ in NOT_DIFFERENTIATED:
        return
    scores = lo.ACC("exact", readout="exact").score(run.head(1), task, QUERY, ids=run.record(0).ids.tolist()[:2])
    replays = lo.Replay().score(run.head(1), task, QUERY, ids=run.record(0).ids.tolist()[:2])
    assert torch.allclose(scores.values, replays.values, rtol=1e-9, atol=1e-12)


def test_batches_that_the_loop_mixes_are_kept_with_the_run(tmp_path) -> None:
    """Mixup: the recorder is given what the model is given; leaving an example out drops the losses of its row."""

    def losses(out, labels):
        one, other = (F.cross_entropy(out, y, reduction="none") for y in labels)
        return 0.7 * one + 0.3 * other

    def train(out: int | None = None, path=None):
        model = Loop().net(nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        recorder = None if path is None else lo.Recorder(path, model, optimizer, keep_batches=True)
        order = torch.Generator().manual_seed(0)
        for ids in torch.randperm(20, generator=order).split(4):
            x, y = (tensor[ids] for tensor in TRAIN.tensors[:2])
            mixed = torch.randperm(4, generator=order)
            batch = 0.7 * x + 0.3 * x[mixed], y, y[mixed]
            if recorder is not None:
                recorder.step(ids, batch)
            optimizer.zero_grad()
            (losses(model(batch[0]), batch[1:]) * (ids != out)).mean().backward()
            optimizer.step()
        return model, recorder and recorder.finish()

    def query_loss(out: int | None) -> float:
        return float(F.cross_entropy(train(out)[0](QUERY.tensors[0]), QUERY.tensors[1]).detach())

    train_set, query = (TensorDataset(*data.tensors[:2], data.tensors[1]) for data in (TRAIN, QUERY))
    model, run = train(path=tmp_path / "run")
    task = lo.Task(model, losses, train_set, forward=lambda model, batch: (model(batch[0]), tuple(batch[1:])))
    scores = lo.Replay().score(run, task, query, ids=LEFT_OUT).values.flatten()
    truth = [query_loss(k) - query_loss(None) for k in LEFT_OUT]
    assert scores.tolist() == pytest.approx(truth, rel=1e-9)


class Halving(Loop):
    """A hook that changes a gradient."""

    def model(self):
        model = self.net(nn.Tanh())
        model[0].weight.register_hook(lambda gradient: gradient / 2)
        return model


class CalledOnceMore(StillStatistics):
    """Accuracy on the training batch, taken in training mode, moves BatchNorm's statistics a second time."""

    def model(self):
        return self.net(nn.BatchNorm1d(6), nn.Tanh())

    def epoch(self, model, optimizer, loader, weights):
        for batch in loader:
            super().epoch(model, optimizer, [batch], weights)
            with torch.no_grad():
                model(batch[0])


@pytest.mark.parametrize(("kind", "words"), [(Halving, "Hooks on gradients"), (CalledOnceMore, r"model.eval\(\)")])
def test_what_changed_a_step_is_named(kind, words, tmp_path) -> None:
    one = kind()
    model, run = one.train(path=tmp_path / "run", keep="all")
    task = lo.Task(model, one.losses, TRAIN, forward=one.forward, **one.task)
    with pytest.raises(lo.MismatchError, match=words) as error:
        lo.Replay().score(run, task, QUERY, ids=[0])
    assert error.value.code == "step-does-not-follow"


@pytest.mark.parametrize("kind", [LeftOver, PassedOver])
def test_a_window_that_began_in_the_epoch_before_is_resumed(kind, tmp_path) -> None:
    whole = kind().train(path=tmp_path / "whole", keep="all")[1]
    cut = kind()
    cut.stop = 2  # after which the epoch's last batch is left over
    with pytest.raises(KeyboardInterrupt):
        cut.train(path=tmp_path / "cut", keep="all")
    again = kind().train(path=tmp_path / "cut", keep="all", resume=True)[1]
    assert len(again) == len(whole) == 4
    for index in range(5):
        one, other = whole.state(index), again.state(index)
        assert all(torch.equal(one[slot][name], other[slot][name]) for slot in one for name in one[slot])


def test_replays_of_a_model_in_bfloat16_are_not_rounded_to_nothing(tmp_path) -> None:
    """A loss of 1.1 in bfloat16 is a multiple of 1/128, more than most effects; in float32 it shows them."""
    narrow = TensorDataset(TRAIN.tensors[0].bfloat16(), TRAIN.tensors[1])
    query = TensorDataset(QUERY.tensors[0].bfloat16(), QUERY.tensors[1])

    def trained(out: int | None = None, path=None):
        model = Loop().net(nn.Tanh()).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
        recorder = None if path is None else lo.Recorder(path, model, optimizer)
        for start in range(0, 20, 4):
            ids = torch.arange(start, start + 4)
            x, y = (tensor[ids] for tensor in narrow.tensors)
            if recorder is not None:
                recorder.step(ids, [x, y])
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y, reduction="none") * (ids != out)).mean().backward()
            optimizer.step()
        return model, recorder and recorder.finish()

    def loss(model: nn.Module) -> float:
        wide = copy.deepcopy(model).float()
        with torch.no_grad():
            return float(F.cross_entropy(wide(query.tensors[0].float()), query.tensors[1]))

    model, run = trained(path=tmp_path / "run")
    task = lo.Task(model, nn.CrossEntropyLoss(), narrow)
    truth = torch.tensor([loss(trained(k)[0]) - loss(model) for k in range(20)])
    assert truth.abs().median() < 1 / 128
    for method, rounding in ((lo.Replay(), 0.1), (lo.ACC("exact", readout="exact"), 0.25)):  # of training itself
        scores = method.score(run, task, query)
        assert scores.values.dtype == torch.float32
        assert (scores.values.flatten() - truth).norm() < rounding * truth.norm()
