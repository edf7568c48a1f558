"""A loss given as a function of ``torch.nn.functional`` is that of a plain loop with the same function."""

import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from refusal import refused

WEIGHT = torch.tensor([1.0, 2.0, 0.5]).double()
CLASSES = torch.arange(12) % 3
LOSSES = {
    "cross-entropy": (F.cross_entropy, CLASSES),
    "smoothed, weighted": (partial(F.cross_entropy, label_smoothing=0.1, weight=WEIGHT), CLASSES),
    "squares, summed": (partial(F.mse_loss, reduction="sum"), torch.eye(3).double()[CLASSES]),
    "binary": (F.binary_cross_entropy_with_logits, torch.eye(3).double()[CLASSES]),
    "Huber": (partial(F.huber_loss, delta=0.3), torch.eye(3).double()[CLASSES]),
}
LEFT_OUT = 4


def trained(loss, x, y, path: Path | None = None):
    """Train for nine steps; without a path, with the loss's elements of one example set to zero."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    recorder = lo.Recorder(path, model, optimizer) if path else None
    each = partial(loss, reduction="none")
    for step in range(9):
        ids = torch.arange(4) + 4 * (step % 3)
        optimizer.zero_grad()
        whole, elements = loss(model(x[ids]), y[ids]), each(model(x[ids]), y[ids])
        if recorder is None:
            kept = (ids != LEFT_OUT).double().reshape(-1, *[1] * (elements.ndim - 1))
            whole = (elements * kept).sum() * (whole / elements.sum()).detach()  # the same denominator
        whole.backward()
        if recorder is not None:
            recorder.step(ids, [x[ids], y[ids]])
        optimizer.step()
    return model, recorder.finish() if recorder else None


@pytest.mark.parametrize("name", LOSSES)
def test_replays_are_plain_retraining(name, tmp_path):
    loss, y = LOSSES[name]
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).double()
    model, run = trained(loss, x, y, tmp_path / "run")
    data = TensorDataset(x, y)
    task = lo.Task(model, loss, data)
    scores = lo.Replay().score(run, task, TensorDataset(x[:1], y[:1]), ids=[LEFT_OUT])
    other, _ = trained(loss, x, y)
    with torch.no_grad():
        truth = loss(other(x[:1]), y[:1]) - loss(model(x[:1]), y[:1])
    if name == "squares, summed":
        truth = truth / 3  # the loss of a query is the mean of its elements
    assert float(scores.values[0, 0]) == pytest.approx(float(truth), rel=1e-8)


def test_a_function_that_is_not_pytorchs_still_has_to_say_each_examples_loss():
    data = TensorDataset(torch.randn(4, 4), torch.zeros(4).long())
    with refused(lo.UnsupportedError, "task-not-supported", "reduction='none'"):
        lo.Task(nn.Linear(4, 3), lambda outputs, targets: F.cross_entropy(outputs, targets), data)
    lo.Task(nn.Linear(4, 3), partial(F.cross_entropy, reduction="none"), data)


def losses_and_counts(out, y):
    return F.cross_entropy(out, y, reduction="none"), torch.ones(len(y))


PICKLED = {
    "classes": nn.CrossEntropyLoss(label_smoothing=0.1),
    "function": F.cross_entropy,
    "sum": nn.NLLLoss(reduction="sum"),
    "elements": nn.BCEWithLogitsLoss(),
    "own": losses_and_counts,
}


@pytest.mark.parametrize("name", PICKLED)
def test_a_task_is_pickled_before_and_after_it_was_used(name: str, tmp_path) -> None:
    torch.manual_seed(0)
    end = nn.LogSoftmax(1) if name == "sum" else nn.Identity()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 2), end)
    y = torch.randint(2, (12,))
    data = TensorDataset(torch.randn(12, 3), F.one_hot(y, 2).float() if name == "elements" else y)
    task = lo.Task(model, PICKLED[name], data)
    before = pickle.dumps(task)
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.1), 2, 4, 0, tmp_path / "run")
    scores = lo.SGDIE().score(run, task, data).values
    for dumped in (before, pickle.dumps(task)):
        assert torch.equal(lo.SGDIE().score(run, pickle.loads(dumped), data).values, scores)  # noqa: S301 - ours


def test_a_task_with_a_function_without_a_name_says_which(tmp_path) -> None:
    data = TensorDataset(torch.randn(12, 3), torch.randint(2, (12,)))
    task = lo.Task(nn.Linear(3, 2), lambda out, y: F.cross_entropy(out, y, reduction="none"), data)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(task)
