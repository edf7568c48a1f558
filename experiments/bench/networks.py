"""The kinds of networks people use, slim enough for two cores: a GPT, LoRA adapters on a wider one, a ResNet-18."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.utils.data import TensorDataset

from experiments.bench.problems import QUIET, folder
from experiments.reproduce.words import sequences
from leaveout.builtin import data, models
from leaveout.run.reader import Run
from leaveout.run.train import train
from leaveout.task.task import Task

WORDS, LENGTH = 2000, 64
RANK = 8


@dataclass(frozen=True)
class Problem:
    """A recorded run with its task and queries, and how to train the same steps in an ordinary loop."""

    task: Task
    run: Run
    query: TensorDataset
    start: nn.Module
    optimizer: Callable[[Any], torch.optim.Optimizer]

    def train(self) -> None:
        """Train the run's steps again in an ordinary PyTorch loop: nothing recorded, nothing checked."""
        model, loss = copy.deepcopy(self.start), nn.CrossEntropyLoss()
        optimizer = self.optimizer([param for param in model.parameters() if param.requires_grad])
        x, y = self.task.train_set.tensors  # type: ignore[attr-defined]
        for index in range(len(self.run)):
            ids = self.run.record(index).ids
            optimizer.zero_grad()
            loss(model(x[ids]), y[ids]).backward()
            optimizer.step()


def small_gpt(steps: int, *, width: int = 128, adapters: bool = False, queries: int = 32) -> Problem:
    """Train a GPT on the first 64 words of newsgroup texts with AdamW: four layers, 2,000 words, batches of 32.

    It has 1.3 million parameters at width 128; with ``adapters``, only LoRA's are trained.
    """
    tokens = sequences(WORDS, LENGTH)
    chosen, val, _ = data.split(len(tokens), 32 * steps, queries, 0)
    parts = [TensorDataset(tokens[rows][:, :-1], tokens[rows][:, 1:]) for rows in (chosen, val)]
    model = models.build("gpt", seed=0, words=WORDS, width=width, layers=4, heads=4, positions=LENGTH)
    if adapters:
        torch.manual_seed(0)
        adapt(model)
    return recorded(model, parts[0], parts[1], lambda params: torch.optim.AdamW(params, lr=1e-3), 32)


def slim_resnet(steps: int, width: int = 16, size: int = 64) -> Problem:
    """Train a ResNet-18 with BatchNorm on CIFAR-10 with momentum, in batches; the original's width is 64."""
    loaded = data.load("cifar10", n_train=size * steps, n_val=100)
    parts = [TensorDataset(part.x.reshape(-1, 3, 32, 32), part.y) for part in (loaded.train, loaded.val)]
    torch.manual_seed(0)
    return recorded(
        resnet18(width), parts[0], parts[1], lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), size
    )


def recorded(
    model: nn.Module,
    train_set: TensorDataset,
    query: TensorDataset,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    size: int,
) -> Problem:
    """Train one epoch and record every state."""
    start = copy.deepcopy(model)
    task = Task(model, nn.CrossEntropyLoss(), train_set)
    trained = [param for param in model.parameters() if param.requires_grad]
    run = train(task, optimizer(trained), 1, size, 0, folder(), keep="all", resources=QUIET)
    return Problem(task, run, query, start, optimizer)


class Adapted(nn.Module):
    """A frozen linear map plus a trained one of low rank, W x + B A x: LoRA."""

    def __init__(self, linear: nn.Linear, rank: int = RANK) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both outputs."""
        return self.linear(x) + (x @ self.down.T) @ self.up.T


def adapt(model: nn.Module) -> None:
    """Freeze a GPT, and add LoRA adapters to every linear map of its layers."""
    for param in model.parameters():
        param.requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        for name in ("mixed", "out", "wide", "narrow"):
            setattr(block, name, Adapted(getattr(block, name)))


class Residual(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm, added to their input."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's outputs."""
        inner = relu(self.norms[0](self.first(x)))
        return relu(self.norms[1](self.second(inner)) + self.shortcut(x))


def resnet18(width: int) -> nn.Module:
    """Build ResNet-18 for small images."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for stage in range(4):
        for stride in (1 if stage == 0 else 2, 1):
            layers.append(Residual(before, width << stage, stride))
            before = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))
