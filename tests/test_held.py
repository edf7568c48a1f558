"""Kept batches that depended on the parameters are held as they happened, and scores, page and run say so."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from refusal import refused

STEPS = 5
DATA = TensorDataset(
    torch.randn(12, 3, 2, generator=torch.Generator().manual_seed(0)).double(), torch.zeros(12, 1, 4).double(),
    torch.arange(12) % 2,
)  # fmt: skip


class Carried(nn.Module):
    """A recurrent classifier that returns its state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.RNN(2, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, h):
        out, last = self.body(x, h.transpose(0, 1).contiguous())
        return self.head(out[:, -1]), last


def record(path, keep_batches=True, attack=False, detach=torch.Tensor.detach):
    model = Carried().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    recorder = lo.Recorder(path, model, optimizer, keep_batches=keep_batches)
    h = torch.zeros(4, 1, 4).double()
    for step in range(STEPS):
        ids = [step, 5, 7, 11]
        x, _, y = DATA[ids]
        if attack:
            x = x.clone().requires_grad_()
            nn.functional.cross_entropy(model(x, h)[0], y).backward()
            x = (x + 0.1 * x.grad.sign()).detach()
        recorder.step(ids, (x, h, y))
        optimizer.zero_grad()
        outputs, last = model(x, h)
        nn.functional.cross_entropy(outputs, y).backward()
        optimizer.step()
        if not attack:
            h = detach(last).transpose(0, 1)
    return recorder.finish()


def task():
    def forward(model, batch):
        return model(batch[0], batch[1])[0], batch[2]

    return lo.Task(Carried().double(), nn.CrossEntropyLoss(), DATA, forward=forward)


def test_a_carried_state_is_found_in_the_batches_and_said_by_scores_and_page(tmp_path):
    run = record(tmp_path / "run")
    assert "carried state" in run.held
    scores = lo.Replay().score(run, task(), DATA)
    assert "held as they happened" in str(scores)
    assert lo.Scores.load(scores.save(tmp_path / "scores.safetensors")) == scores
    page = lo.report(tmp_path / "page.html", run, scores, task=task()).read_text()
    assert "held as they happened" in page


@pytest.mark.parametrize(
    ("how", "words"),
    [({"attack": True}, "2 forward passes"), ({"detach": lambda h: h.detach().clone()}, "held as the loop gave them")],
)
def test_batches_of_the_loop_are_said_to_be_held_where_nothing_is_proven(how, words, tmp_path):
    assert words in record(tmp_path / "run", **how).held


def test_what_is_held_is_what_makes_the_difference(tmp_path):
    """The truth with the state carried anew differs from the replay; with the state held, it is the replay."""
    run = record(tmp_path / "run")
    replay = lo.Replay().score(run, task(), DATA).values[5, 0]

    def trained(weight, *, held):
        model = Carried().double()
        h = torch.zeros(4, 1, 4).double()
        for step in range(STEPS):
            ids = [step, 5, 7, 11]
            x, _, y = DATA[ids]
            h = run.batches(step)[0][1] if held else h
            outputs, last = model(x, h)
            losses = nn.functional.cross_entropy(outputs, y, reduction="none")
            loss = (losses * torch.tensor([1.0 if i != 5 else weight for i in ids])).sum() / 4
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for param, grad in zip(model.parameters(), grads, strict=True):
                    param -= 0.5 * grad
            h = last.detach().transpose(0, 1)
        with torch.no_grad():
            return nn.functional.cross_entropy(model(DATA[:][0], DATA[:][1])[0], DATA[:][2])

    held, carried = (float(trained(0.0, held=h) - trained(1.0, held=h)) for h in (True, False))
    assert float(replay) == pytest.approx(held, abs=1e-9)
    assert abs(float(replay) - carried) > 1e-5


def test_batches_that_are_to_be_kept_must_be_given(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer, keep_batches=True)
    recorder.step([0, 1])
    model(torch.ones(2, 2)).sum().backward()
    with refused(lo.InputError, "batch-not-given"):
        optimizer.step()
