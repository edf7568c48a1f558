"""A hidden state that a module keeps in a buffer is part of the run, however it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leaveout as lo
from refusal import refused

SIZE, BATCH, EPOCHS, RATE, STEP = 12, 4, 3, 0.2, 1e-5


class Carried(nn.Module):
    """Adds the mean hidden state of the batch before, or each row's, to the next one's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(5) if "norm" in kind else nn.Identity()
        self.register_buffer("state", torch.zeros(BATCH, 5) if kind == "rows" else torch.zeros(5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        state = self.state.mean(0) if self.kind == "rows" and not self.training else self.state
        h = torch.tanh(self.norm(self.first(x)) + state)
        if self.training and "in place" in self.kind:
            with torch.no_grad():
                self.state.mul_(0.5).add_(0.5 * h.mean(0))
        elif self.training:
            self.state = (h if self.kind == "rows" else 0.5 * self.state + 0.5 * h.mean(0)).detach()
        return self.last(h)


class Queue(Carried):
    """A queue of hidden states, whose mean the next batches are compared with."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.register_buffer("queue", torch.zeros(8, 5, dtype=torch.float64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x) - self.queue.mean(0))
        if self.training:
            with torch.no_grad():
                place = int(self.place)
                self.queue[place : place + BATCH] = h
                self.place[0] = (place + BATCH) % 8
        return self.last(h)


class Mixed(Carried):
    """Takes the mean of the batch itself away."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.training:
            self.state = 0.9 * self.state + 0.1 * h.mean(0).detach()
            h = h - h.mean(0)
        return self.last(h)


def made(kind: str) -> Carried:
    return Queue(kind) if kind == "queue" else Carried(kind)


def data() -> tuple[TensorDataset, TensorDataset]:
    order = torch.Generator().manual_seed(3)
    x = torch.randn(SIZE, 4, dtype=torch.float64, generator=order)
    y = torch.randint(3, (SIZE,), generator=order)
    return TensorDataset(x, y), TensorDataset(x[:5] + 0.1, y[:5])


def recorded(path: Path, model: nn.Module, rows: TensorDataset, batch: int = BATCH) -> lo.Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with lo.Recorder(path / "run", model, optimizer) as recorder:
        for _ in range(EPOCHS):
            for ids in torch.arange(SIZE).split(batch):
                x, y = rows[ids]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                recorder.step(ids, [x, y])
                optimizer.step()
    return lo.open_run(path / "run")


def trained_loss(kind: str, weights: Tensor) -> float:
    """Train with weights of the examples' losses by a plain loop, and return the loss on the queries."""
    model, (rows, queries) = made(kind), data()
    for _ in range(EPOCHS):
        for ids in torch.arange(SIZE).split(BATCH):
            x, y = rows[ids]
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            gradients = torch.autograd.grad((weights[ids] * losses).sum() / BATCH, list(model.parameters()))
            with torch.no_grad():
                for param, slope in zip(model.parameters(), gradients, strict=True):
                    param -= RATE * slope
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.eval()(queries.tensors[0]), queries.tensors[1]))


def moved(kind: str, row: int, weight: float) -> float:
    weights = torch.ones(SIZE, dtype=torch.float64)
    weights[row] = weight
    return trained_loss(kind, weights)


@pytest.mark.parametrize("statistics", ["leave", "stay"])
@pytest.mark.parametrize("kind", ["in place", "another", "rows", "queue"])
def test_the_state_is_followed_and_keeps_the_example(tmp_path: Path, kind: str, statistics: str) -> None:
    model, (rows, queries) = made(kind), data()
    run = recorded(tmp_path, model, rows)
    assert list(run.manifest.buffers) == (["queue", "place"] if kind == "queue" else ["state"])
    task = lo.Task(made(kind), nn.CrossEntropyLoss(), rows, statistics=statistics)
    ids = [0, 5, 11]
    removed = [moved(kind, row, 0.0) - moved(kind, row, 1.0) for row in ids]
    assert lo.Replay().score(run, task, queries, ids=ids).values[:, 0].tolist() == pytest.approx(removed, abs=1e-12)
    slopes = [(moved(kind, row, 1 - STEP) - moved(kind, row, 1 + STEP)) / (2 * STEP) for row in ids]
    assert lo.SGDIE().score(run, task, queries, ids=ids).values[:, 0].tolist() == pytest.approx(slopes, abs=1e-8)


@pytest.mark.parametrize("kind", ["norm, in place", "norm, another"])
def test_beside_batch_norm(tmp_path: Path, kind: str) -> None:
    model, (rows, queries) = Carried(kind), data()
    run = recorded(tmp_path, model, rows)
    assert "state" in run.manifest.buffers
    ids = [0, 5]
    task = lo.Task(Carried(kind), nn.CrossEntropyLoss(), rows, statistics="stay")
    slopes = [(moved(kind, row, 1 - STEP) - moved(kind, row, 1 + STEP)) / (2 * STEP) for row in ids]
    assert lo.SGDIE().score(run, task, queries, ids=ids).values[:, 0].tolist() == pytest.approx(slopes, abs=1e-8)
    # Where the example leaves BatchNorm's statistics, replays with its weight slightly changed are the truth.
    task = lo.Task(Carried(kind), nn.CrossEntropyLoss(), rows)
    less, more = (lo.Replay(weight=1 + step).score(run, task, queries, ids=ids).values for step in (-STEP, STEP))
    slopes = ((less - more)[:, 0] / (2 * STEP)).tolist()
    assert lo.SGDIE().score(run, task, queries, ids=ids).values[:, 0].tolist() == pytest.approx(slopes, abs=1e-8)


def test_examples_that_depend_on_each_other_otherwise(tmp_path: Path) -> None:
    model, (rows, queries) = Mixed("another"), data()
    run = recorded(tmp_path, model, rows)
    with refused(lo.UnsupportedError, "task-not-supported", "BatchNorm's", "statistics='stay'"):
        lo.SGDIE().score(run, lo.Task(model, nn.CrossEntropyLoss(), rows), queries)
    task = lo.Task(model, nn.CrossEntropyLoss(), rows, statistics="stay")
    assert lo.SGDIE().score(run, task, queries).values.isfinite().all()


class Growing(Carried):
    """Keeps the hidden states of a batch, however many there are."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x) + self.state.mean(0))
        if self.training:
            self.state = h.detach()
        return self.last(h)


def test_a_state_that_changes_its_shape(tmp_path: Path) -> None:
    model, (rows, _) = Growing("rows"), data()
    model.state = torch.zeros(5, 5, dtype=torch.float64)
    with refused(lo.UnsupportedError, "buffer-resized", "At step 2", "'state'", "[2, 5]", "drop_last=True"):
        recorded(tmp_path, model, rows, batch=5)


def test_a_state_that_is_made_by_the_first_pass(tmp_path: Path) -> None:
    model, (rows, _) = Growing("rows"), data()
    model.state = torch.zeros(1, 5, dtype=torch.float64)
    with (
        pytest.warns(lo.LeaveoutWarning, match="gives other outputs when it is computed again"),
        refused(lo.UnsupportedError, "buffer-moved-late", "At step 1", "'state'", "its shape"),
    ):
        recorded(tmp_path, model, rows)


class Table(nn.Module):
    """Makes a table of positions when it is first called, as some transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.register_buffer("table", None)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return self.last(x + self.table)


def test_a_table_made_by_the_first_pass_is_a_constant(tmp_path: Path) -> None:
    model, (rows, queries) = Table(), data()
    run = recorded(tmp_path, model, rows)
    assert not run.manifest.buffers
    task = lo.Task(model, nn.CrossEntropyLoss(), rows)
    assert lo.Replay().score(run, task, queries).values.abs().min() > 0
