"""Small problems in float64 that the tests share: models, data, optimizers, and runs recorded from plain loops."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.builtin import models
from leaveout.evaluate import choose
from oracle import Oracle

CHECK = False
"""Whether the tasks here compare their derivatives when they are made: that guard has its own tests."""


@dataclass(frozen=True)
class Problem:
    run: lo.Run
    task: lo.Task
    train: TensorDataset
    query: TensorDataset
    oracle: Oracle

    @property
    def n(self) -> int:
        return len(self.train)


def logistic() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)).double()


def conv() -> nn.Module:
    layers = (nn.Conv2d(1, 2, 2), nn.Softplus(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, 3))
    return nn.Sequential(*layers).double()


def tiny_gpt() -> tuple[nn.Module, TensorDataset]:
    """A transformer of one layer on 20 sequences of nine words."""
    tokens = torch.randint(9, (20, 6), generator=torch.Generator().manual_seed(0))
    model = models.build("gpt", seed=0, words=9, width=8, layers=1, heads=2, positions=5).double()
    return model, TensorDataset(tokens[:, :-1], tokens[:, 1:])


MODELS: dict[str, tuple[Callable[[], nn.Module], nn.Module, float]] = {
    "logistic": (logistic, nn.BCEWithLogitsLoss(), 0.05),
    "mlp": (mlp, nn.BCEWithLogitsLoss(), 0.0),
    "conv": (conv, nn.CrossEntropyLoss(), 0.01),
}


def two_groups(model: nn.Module, **other) -> list[dict]:
    """The biases in a group of their own, with other settings."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": weights}, {"params": biases, **other}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(two_groups(m, lr=0.2), lr=0.3),
    "decay": lambda m: torch.optim.SGD(two_groups(m, weight_decay=0.0), lr=0.3, weight_decay=0.1),
    "momentum": lambda m: torch.optim.SGD(two_groups(m, momentum=0.5), lr=0.1, momentum=0.9, dampening=0.2),
    "nesterov": lambda m: torch.optim.SGD(
        two_groups(m, lr=0.05), lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.02
    ),
    "adam": lambda m: torch.optim.Adam(two_groups(m, lr=0.02), lr=0.05, betas=(0.8, 0.95), weight_decay=0.1),
    "adamw": lambda m: torch.optim.AdamW(two_groups(m, betas=(0.5, 0.9)), lr=0.05, weight_decay=0.2),
}


def data_for(name: str, n: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    if name == "conv":
        x = torch.randn(n, 1, 4, 4, dtype=torch.float64, generator=generator)
        return TensorDataset(x, torch.randint(3, (n,), generator=generator))
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    noise = torch.randn(n, dtype=torch.float64, generator=generator)
    return TensorDataset(x, (x.sum(1) + noise > 0).double())


def shuffled(n: int, size: int, epochs: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [part.tolist() for _ in range(epochs) for part in torch.randperm(n, generator=generator).split(size)]


def recorded(
    path,
    model_name: str = "mlp",
    optimizer: str | Callable[[nn.Module], torch.optim.Optimizer] = "sgd",
    *,
    n: int = 6,
    batches: list[list[int]] | None = None,
    epochs: list[int] | None = None,
    seed: int = 0,
    keep: int | str = "auto",
) -> Problem:
    """A run from a plain loop with a schedule; by default three epochs of ragged batches."""
    make, loss, l2 = MODELS[model_name]
    torch.manual_seed(seed)
    model = make()
    train, query = data_for(model_name, n, seed), data_for(model_name, 4, seed + 1)
    made = OPTIMIZERS[optimizer](model) if isinstance(optimizer, str) else optimizer(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.97)
    recorder = lo.Recorder(path, model, made, keep=keep)
    for i, ids in enumerate(batches or shuffled(n, 4, 3)):
        made.zero_grad()
        x, y = train.tensors[0][ids], train.tensors[1][ids]
        penalty = 0.5 * l2 * sum(p.square().sum() for p in model.parameters())
        (loss(model(x), y) + penalty).backward()
        recorder.step(ids, [x, y], epoch=epochs[i] if epochs else i // 2)
        made.step()
        schedule.step()
    run = recorder.finish()
    task = lo.Task(model, loss, train, l2=l2, check=CHECK)
    return Problem(run, task, train, query, Oracle(run, model, loss, *train.tensors, l2=l2))


_FOLDER = tempfile.TemporaryDirectory(prefix="leaveout-tests-")


def shared(
    model_name: str = "mlp",
    optimizer: str | Callable[[nn.Module], torch.optim.Optimizer] = "sgd",
    *,
    n: int = 6,
    batches: list[list[int]] | None = None,
    epochs: list[int] | None = None,
    seed: int = 0,
) -> Problem:
    """What ``recorded`` gives, recorded once per process: for tests that only read the run.

    Problems with the same model and data share one task, and with it what has been traced.
    """
    plan = None if batches is None else tuple(map(tuple, batches))
    return _shared(model_name, optimizer, n, plan, None if epochs is None else tuple(epochs), seed)


@functools.cache
def _shared(model_name, optimizer, n, batches, epochs, seed) -> Problem:
    folder = Path(tempfile.mkdtemp(dir=_FOLDER.name))
    plan = None if batches is None else list(map(list, batches))
    with torch.random.fork_rng():
        problem = recorded(folder / "run", model_name, optimizer, n=n, batches=plan, epochs=epochs, seed=seed)
        return replace(problem, task=shared_task(model_name, n, seed))


@functools.cache
def shared_task(model_name: str, n: int, seed: int = 0) -> lo.Task:
    """One task per process for a model and its data."""
    make, loss, l2 = MODELS[model_name]
    return lo.Task(make(), loss, data_for(model_name, n, seed), l2=l2, check=CHECK)


def mostly_full(cases: Iterable, *ordinary) -> list:
    """The cases for ``parametrize``, of which only the ``ordinary`` ones are part of ``make test``."""
    cases = list(cases)
    assert all(case in cases for case in ordinary)
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [() if case in ordinary else pytest.mark.full for case in cases]
    return [pytest.param(*case, marks=mark) for case, mark in zip(several, marks, strict=True)]


def flat(scores: lo.Scores, names: list[str]) -> Tensor:
    """Displacements of every row as one matrix, in the oracle's order."""
    return torch.cat([scores.displacements[name].reshape(len(scores.values), -1) for name in names], dim=1)


def with_least_memory(ask: Callable[[lo.Resources], lo.Scores]) -> lo.Scores:
    """What ``ask`` gives with the smallest budget that is not refused."""
    memory = 1
    while (least := _refused(ask, memory)) is not None:
        assert least > memory
        memory = least
    return ask(lo.Resources(memory=memory))


def _refused(ask: Callable[[lo.Resources], lo.Scores], memory: int) -> int | None:
    try:
        ask(lo.Resources(memory=memory))
    except lo.InputError as error:
        return int(re.search(r"needs at least (\d+) bytes", str(error))[1])
    return None


def only_estimated(monkeypatch, replays):
    """Let ``choose`` estimate at once, as where replays are slow, and compare with this many of them."""
    monkeypatch.setattr(choose, "PROBE", 0.0)
    monkeypatch.setattr(choose, "MOST", replays)


def call_traced(tracer, name: str, function: Callable, *args):
    """What a function gives, by its trace if the tracer has one."""
    return (tracer.find(name, function, args) or function)(*args)
