"""What keeps a run from being scored is said after its first step, and what does not is passed over in silence."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import leaveout as lo
from refusal import refused

DATA = TensorDataset(torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2)


class Net(nn.Module):
    """Two layers with something in between."""

    def __init__(self, middle=torch.tanh):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.middle = nn.Linear(6, 5), nn.Linear(5, 2), middle

    def forward(self, x):
        return self.last(self.middle(self.first(x.flatten(1))))


class NumpyNoise(Net):
    def forward(self, x):
        return super().forward(x) + float(np.random.normal())


class Counter(Net):
    """Returns something else each time."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x) * type(self).calls


class Copies(Net):
    """Computes with copies of its parameters that are not its parameters."""

    def __init__(self):
        super().__init__()
        self.held = [self.first.weight, self.first.bias, self.last.weight, self.last.bias]

    def forward(self, x):
        a, b, c, d = self.held
        return torch.tanh(x @ a.T + b) @ c.T + d


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.from_numpy(1 - np.tanh(x.detach().numpy()) ** 2)


def train(path, model, prepare=lambda x: x, data=DATA, how="stop", called=None):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    called = called or model
    with lo.Recorder(path, called, optimizer, on_problem=how, overwrite=True) as recorder:
        for x, y in recorder.watch(DataLoader(data, 4)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(called(prepare(x)), y).backward()
            optimizer.step()
    return recorder


@pytest.mark.parametrize(
    ("model", "code", "word"),
    [
        (NumpyNoise, "pass-differs", "numpy's or Python's generator"),
        (Counter, "pass-differs", "counter"),
        (Copies, "outputs-do-not-follow", "functional_call"),
        (lambda: Net(Hidden.apply), "model-not-supported", "Hidden"),
    ],
)
def test_a_model_that_cannot_be_computed_again(model, code, word, tmp_path):
    with refused(lo.UnsupportedError, code, word):
        train(tmp_path / "run", model())
    with pytest.warns(lo.LeaveoutWarning, match="Training goes on"):
        train(tmp_path / "run", model(), how="warn")
    assert len(lo.open_run(tmp_path / "run")) == 3


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x + 0.1 * torch.randn_like(x),
        lambda x: np.random.beta(1, 1) * x,
        lambda x: random.random() * x + x.flip(0),
    ],
)
def test_an_input_that_the_loop_drew(draw, tmp_path):
    with refused(lo.UnsupportedError, "input-drawn", "mixup", "collate function"):
        train(tmp_path / "run", Net(), draw)


@pytest.mark.parametrize("prepare", [lambda x: x.double().float(), lambda x: x.view(4, 2, 3), lambda x: x / 2])
def test_an_input_prepared_without_a_draw_is_no_problem(prepare, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "run", Net(), prepare)
    seen = lo.open_run(tmp_path / "run").manifest.seen
    assert seen["given"] == ("otherwise" if prepare(torch.ones(4, 6))[0].sum() == 3 else "as yielded")


class Named(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return *DATA[i], f"name {i}"


def test_a_batch_without_a_row_for_each_example(tmp_path):
    optimizer = torch.optim.SGD((model := Net()).parameters(), 0.1)
    recorder = lo.Recorder(tmp_path / "names", model, optimizer, on_problem="stop")
    with refused(lo.UnsupportedError, "rows-differ", "item 2", "a str"):
        for x, y, _ in recorder.watch(DataLoader(Named(), 4)):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    optimizer = torch.optim.SGD((model := Net()).parameters(), 0.1)
    recorder = lo.Recorder(tmp_path / "ragged", model, optimizer, on_problem="stop")
    x, y = DATA[:4]
    recorder.step([0, 1], (x, y))
    nn.functional.cross_entropy(model(x), y).backward()
    with refused(lo.UnsupportedError, "rows-differ", "[4, 6]"):
        optimizer.step()


def test_dropout_batch_norm_accumulation_and_autocast_are_proven_in_silence(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    before = random.getstate(), np.random.get_state()[1].tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
            for number, (x, y) in enumerate(recorder.watch(DataLoader(DATA, 4))):
                with torch.autocast("cpu", torch.bfloat16):
                    nn.functional.cross_entropy(model(x), y).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.full
def test_a_compiled_model_with_dropout_is_told_so(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 2))
    with refused(lo.UnsupportedError, "pass-differs", "fallback_random"):
        train(tmp_path / "run", model, called=torch.compile(model))
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_random=True):
        train(tmp_path / "run", model, called=torch.compile(model))


SEEN = {
    "attack": (lambda model, x, y: attacked(model, x, y), "2 forward passes for a batch"),
    "drawn": (lambda _model, x, _y: x + torch.randn_like(x), "with random numbers drawn in between"),
    "scaled": (lambda _model, x, _y: 3 * x.flip(1), "a forward= that makes the same"),
    "loss": (lambda _model, x, _y: x, "Is the loss, l2 or a class weight another"),
}


def attacked(model, x, y):
    x = x.clone().requires_grad_()
    nn.functional.cross_entropy(model(x), y).backward()
    model.zero_grad()
    return (x + x.grad.sign()).detach()


@pytest.mark.parametrize("what", SEEN)
@pytest.mark.filterwarnings("ignore::leaveout.LeaveoutWarning")
def test_a_step_that_does_not_follow_is_answered_from_what_was_seen(what, tmp_path):
    prepare, words = SEEN[what]
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        for x, y in recorder.watch(DataLoader(DATA, 4)):
            given = prepare(model, x, y)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(given), y, label_smoothing=0.3 * (what == "loss")).backward()
            optimizer.step()
    with refused(lo.MismatchError, "step-does-not-follow", words) as caught:
        lo.SGDIE().score(lo.open_run(tmp_path / "run"), lo.Task(Net(), nn.CrossEntropyLoss(), DATA), DATA)
    assert sum(words in str(caught.value) for _, words in SEEN.values()) == 1
    assert "skipped batches" not in str(caught.value)
