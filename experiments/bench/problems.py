"""The trained problems that the cases share."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from torch import nn
from torch.utils.data import TensorDataset

from experiments.reproduce.words import sequences
from leaveout.builtin import data, models
from leaveout.builtin.data import Data
from leaveout.compute.resources import Resources
from leaveout.run.reader import Run
from leaveout.run.train import train
from leaveout.task.task import Task

T = TypeVar("T")
QUIET = Resources(progress=False)


def folder(*, memory: bool = False) -> Path:
    """Create a new place for a run, which the system removes in its own time; in memory, if there is such a place."""
    place = "/dev/shm" if memory and Path("/dev/shm").is_dir() else None  # noqa: S108 - with a name of its own
    return Path(tempfile.mkdtemp(prefix="leaveout-bench-", dir=place)) / "run"


CLOCKS: list[Callable[[], float]] = [time.perf_counter]
"""Clocks, of which the last one is used: that of CPU time on a machine that has other work."""


def seconds(function: Callable[[], T]) -> tuple[float, T]:
    """Measure how long a call takes; return that and its result."""
    clock = CLOCKS[-1]
    start = clock()
    result = function()
    return clock() - start, result


def quickest(rounds: int, *functions: Callable[[], object]) -> list[float]:
    """Measure the least seconds of each function, called in turns: other work on the machine only ever adds to them."""
    times = [[seconds(function)[0] for function in functions] for _ in range(rounds)]
    return [min(column) for column in zip(*times, strict=True)]


def slower(rounds: int, plain: Callable[[], object], *others: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Measure how many times as long the others take: the medians of ratios within a round, and all least seconds.

    The machine may be faster in one round than in the next, but is much the same within one.
    """
    times = [[seconds(function)[0] for function in (plain, *others)] for _ in range(rounds)]
    ratios = zip(*([other / first for other in rest] for first, *rest in times), strict=True)
    return [median(column) for column in ratios], [min(column) for column in zip(*times, strict=True)]


def binary(
    name: str,
    model: str,
    *,
    n: int = 400,
    size: int = 100,
    epochs: int = 30,
    seed: int = 0,
    l2: float = 0.0,
    momentum: float = 0.0,
) -> tuple[Data, Task, Run]:
    """Train logistic regression or the 8-8 network on a two-class data set with SGD at 0.1."""
    dataset = data.load(name, n_train=n, n_val=400, seed=seed)
    net = models.build(model, seed=seed, features=dataset.train.x.shape[1])
    task = Task(net, nn.BCEWithLogitsLoss(), dataset.train, l2=l2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
    return dataset, task, train(task, optimizer, epochs, size, seed, folder(), resources=QUIET)


def images(n: int, epochs: int, *, size: int = 64, adam: bool = False) -> tuple[Data, Task, Run]:
    """Train the convolutional network on n MNIST images with SGD, or with AdamW."""
    dataset = data.load("mnist", n_train=n, n_val=1000)
    net = models.build("mnist-cnn", seed=0)
    task = Task(net, nn.CrossEntropyLoss(), dataset.train)
    params = net.parameters()
    optimizer = torch.optim.AdamW(params, lr=0.001) if adam else torch.optim.SGD(params, lr=0.05)
    return dataset, task, train(task, optimizer, epochs, size, 0, folder(), resources=QUIET)


def texts(n: int, queries: int) -> tuple[TensorDataset, TensorDataset]:
    """Return sequences of 64 words from 20News, with 2,000 different words, each with the words that follow."""
    tokens = sequences(2_000, 64)
    train, val, _ = data.split(len(tokens), n, queries, 0)
    return tuple(TensorDataset(tokens[rows][:, :-1], tokens[rows][:, 1:]) for rows in (train, val))  # type: ignore[return-value]


def small_gpt() -> nn.Module:
    """Build a GPT with four layers of width 128 for 64 of 2,000 words: 1.3 million parameters."""
    return models.build("gpt", seed=0, words=2_000, width=128, layers=4, heads=4, positions=64)


def language(n: int, epochs: int, *, keep: str = "all") -> tuple[TensorDataset, Task, Run]:
    """Train the GPT on n texts in batches of 32 with AdamW; the first value is 100 other texts as queries."""
    train_set, val = texts(n, 100)
    net = small_gpt()
    task = Task(net, nn.CrossEntropyLoss(), train_set)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    return val, task, train(task, optimizer, epochs, 32, 0, folder(), keep=keep, resources=QUIET)


def digits(hidden: tuple[int, ...], epochs: int, *, size: int = 50) -> tuple[Data, Task, Run]:
    """Train a ReLU network on all digits."""
    dataset = data.load("digits")
    net = models.build("mlp", seed=0, features=64, hidden=hidden, outputs=10)
    task = Task(net, nn.CrossEntropyLoss(), dataset.train)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return dataset, task, train(task, optimizer, epochs, size, 0, folder(), resources=QUIET)


def plain_training(task: Task, run: Run, model: nn.Module, loss: nn.Module) -> float:
    """Time an ordinary PyTorch loop over the run's steps: nothing recorded, nothing checked."""
    optimizer = torch.optim.SGD(model.parameters(), lr=run.record(0).hypers[0]["lr"])
    plans = [run.record(i).ids for i in range(len(run))]
    x, y = task.train_set.tensors  # type: ignore[attr-defined]

    def loop() -> None:
        for ids in plans:
            optimizer.zero_grad()
            loss(model(x[ids]), y[ids]).backward()
            optimizer.step()

    return seconds(loop)[0]
