"""Embeddings with ``padding_idx`` that are fed the padding, and stop-gradients under BatchNorm: PyTorch's gradient is
not the loss's derivative there, and scores are those of the training that uses it."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo
from leaveout.diff.forms import Form
from refusal import refused

WORDS, WIDTH, COUNT = 7, 5, 12
LEFT_OUT = [0, 5]


class Sentences(nn.Module):
    """Mean embeddings, padding included, whose row is not zero."""

    def __init__(self, kind: str, norm: bool) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=None if kind == "detached" else 0)
        nn.init.normal_(self.table.weight)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if kind == "tied":
            self.head.weight = self.table.weight

    def forward(self, words):
        value = torch.tanh(self.norm(self.body(self.table(words).mean(1))))
        return self.head(value * value.detach() if self.kind == "detached" else value)


def rows(count: int, seed: int) -> TensorDataset:
    order = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (count, 4), generator=order)
    words[:, 3] = 0
    return TensorDataset(words, torch.randint(0, WORDS, (count,), generator=order))


TRAIN, QUERY = rows(COUNT, 0), rows(5, 1)


def train(kind: str, norm: bool, weights: torch.Tensor, path: str | None = None):
    """Train in a plain loop, each example with its weight; recorded where a path is given."""
    torch.manual_seed(1)
    model = Sentences(kind, norm).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5, weight_decay=0.01)
    recorder = lo.Recorder(path, model, optimizer) if path else None
    numbered = TensorDataset(*TRAIN.tensors, torch.arange(COUNT))
    for _ in range(2):
        for x, y, ids in DataLoader(numbered, 6, shuffle=True, generator=torch.Generator().manual_seed(2)):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y, reduction="none") * weights[ids]).mean().backward()
            if recorder:
                recorder.step(ids)
            optimizer.step()
    if recorder:
        return recorder.finish(), model
    model.eval()
    with torch.no_grad():
        return float(F.cross_entropy(model(QUERY.tensors[0]), QUERY.tensors[1]))


def weighted(example: int, change: float) -> torch.Tensor:
    weights = torch.ones(COUNT, dtype=torch.float64)
    weights[example] += change
    return weights


@pytest.mark.parametrize("norm", [False, True], ids=["", "BatchNorm"])
@pytest.mark.parametrize("kind", ["own", "tied", "detached"])
def test_scores_are_those_of_the_training(kind: str, norm: bool) -> None:
    run, model = train(kind, norm, torch.ones(COUNT, dtype=torch.float64), f"{tempfile.mkdtemp()}/run")
    task = lo.Task(model, nn.CrossEntropyLoss(), TRAIN, statistics="stay")
    exact = lo.Replay().score(run, task, QUERY, ids=LEFT_OUT).mean()
    whole = train(kind, norm, weighted(0, 0))
    truth = torch.tensor([train(kind, norm, weighted(k, -1)) - whole for k in LEFT_OUT], dtype=torch.float64)
    assert torch.allclose(exact, truth, rtol=1e-9, atol=1e-13)

    slopes = [(train(kind, norm, weighted(k, -1e-4)) - train(kind, norm, weighted(k, 1e-4))) / 2e-4 for k in LEFT_OUT]
    slopes = torch.tensor(slopes, dtype=torch.float64)
    for direction in ("backward", "forward"):
        scores = lo.SGDIE(direction=direction).score(run, task, QUERY, ids=LEFT_OUT).mean()
        assert torch.allclose(scores, slopes, rtol=1e-6, atol=1e-9)


def test_a_row_that_never_moves_costs_no_symmetry() -> None:
    """The padding's row of an embedding that is used once is a constant, and every method works."""
    run, model = train("own", False, torch.ones(COUNT, dtype=torch.float64), f"{tempfile.mkdtemp()}/run")
    task = lo.Task(model, nn.CrossEntropyLoss(), TRAIN)
    assert task.objective.abilities.whole
    assert task.objective.abilities.symmetric
    assert task.objective.abilities.vector is Form.REVERSE_FORWARD
    truth = lo.Replay().score(run, task, QUERY).mean()
    for method in (lo.ACC(), lo.ACC("exact"), lo.DVEmb()):
        assert lo.metrics.kendall(method.score(run, task, QUERY).mean(), truth) > 0.9


def test_a_row_that_moves_otherwise_is_named() -> None:
    run, model = train("tied", False, torch.ones(COUNT, dtype=torch.float64), f"{tempfile.mkdtemp()}/run")
    with pytest.raises(lo.LeaveoutError, match="padding_idx"):
        lo.ACC("free").score(run, lo.Task(model, nn.CrossEntropyLoss(), TRAIN), QUERY)


def test_the_outputs_readout_needs_as_many_outputs_of_each_query(tmp_path) -> None:
    """Sequences of several lengths, padded to the longest of a batch, have outputs that are not in step."""

    def padded(rows):
        x, y = zip(*rows, strict=True)
        pad = nn.utils.rnn.pad_sequence
        return pad(x, batch_first=True), pad(y, batch_first=True, padding_value=-100)

    order = torch.Generator().manual_seed(0)
    words = [torch.randint(0, WORDS, (length,), generator=order) for length in (2, 5, 3, 4, 2, 5)]
    data = [(row, row) for row in words]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 3), nn.Linear(3, WORDS)).double()
    task = lo.Task(model, nn.CrossEntropyLoss(), data, collate=padded)
    run = lo.train(task, torch.optim.SGD(model.parameters(), 0.1), 2, 3, 0, tmp_path / "run")
    for queries in ("mean", "each"):
        with refused(lo.UnsupportedError, "outputs-differ"):
            lo.SGDIE("outputs").score(run, task, data, queries=queries)
    alike = [data[1], data[5]]
    each = lo.SGDIE("outputs").score(run, task, alike, queries="each").values
    alone = [lo.SGDIE("outputs").score(run, task, [one]).values for one in alike]
    assert torch.allclose(each, torch.cat(alone, 1), atol=1e-14)
