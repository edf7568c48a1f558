"""Recorded runs on wrong labels: flipped on purpose, or given by people."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import Dataset

from experiments.reproduce.problems import trained
from experiments.reproduce.spec import Settings
from leaveout.builtin import data, models
from leaveout.builtin.data import Examples
from leaveout.run.reader import Run
from leaveout.run.recording.recorder import Recorder
from leaveout.task.task import Task

SHOWN = {"digits": "digits", "20news": "20News", "adult": "Adult", "mnist": "MNIST", "cifar10n": "CIFAR-10N"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("mlp", {"hidden": (16,), "outputs": 10, "activation": "tanh"}),
    "20news": ("logistic", {}),
    "adult": ("logistic", {}),
    "mnist": ("mnist-cnn", {}),
}
RUNS: dict[str, dict[str, Any]] = {
    "digits": {"n": 1000, "val": 400, "epochs": 20, "batch": 50, "lr": 0.2, "flipped": 0.1},
    "20news": {"n": 1000, "val": 400, "epochs": 30, "batch": 50, "lr": 0.1, "flipped": 0.1},
    "adult": {"n": 2000, "val": 1000, "epochs": 20, "batch": 50, "lr": 0.1, "flipped": 0.1},
    "mnist": {"n": 4992, "val": 2000, "epochs": 6, "batch": 64, "lr": 0.05, "flipped": 0.1},
    "cifar10n": {"n": 10_000, "val": 2000, "epochs": 6, "batch": 100, "lr": 0.1, "channels": [24, 48, 64, 64]},
}


@dataclass(frozen=True)
class Mislabelled:
    """A recorded run on labels of which some are wrong, and which; validation and test labels are correct."""

    run: Run
    task: Task
    val: Examples
    test: Examples
    wrong: Tensor


@contextmanager
def mislabelled(settings: Settings) -> Iterator[Mislabelled]:
    """Train on wrong labels; the seed draws data, flips, initial weights and order. The run is deleted at the end."""
    name, seed = settings["data"], settings["seed"]
    dataset = data.load(name, n_train=settings["n"], n_val=settings["val"], seed=seed)
    if dataset.train.true is not None:
        with augmented(dataset.train, settings) as (run, task):
            yield Mislabelled(run, task, dataset.val, dataset.test, dataset.train.y != dataset.train.true)
        return
    noisy = data.flip(dataset.train, settings["flipped"], seed + 1)
    kind, options = MODELS[name]
    if kind != "mnist-cnn":
        options = {**options, "features": noisy.examples.x.shape[1]}
    loss = nn.BCEWithLogitsLoss() if len(dataset.classes) == 2 else nn.CrossEntropyLoss()
    model, plain = models.build(kind, seed=seed, **options), {**settings, "l2": 0.0}
    with trained(model, loss, noisy.examples, dataset.val, plain) as problem:
        yield Mislabelled(problem.run, problem.task, dataset.val, dataset.test, noisy.touched)


class Cropped(Dataset):
    """Returns each image randomly cropped by up to four pixels and flipped, differently each time it is read."""

    def __init__(self, examples: Examples) -> None:
        self.examples, self.padded = examples, pad(examples.x, (4,) * 4)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        top, left = torch.randint(9, (2,)).tolist()
        side = self.examples.x.shape[-1]
        crop = self.padded[i, :, top : top + side, left : left + side]
        return (crop.flip(-1) if torch.rand(()) < 0.5 else crop), self.examples.y[i]


def small_network(channels: list[int]) -> nn.Module:
    """Build 3 x 3 convolutions with BatchNorm and ReLU, each but the last halving the image, then a linear layer."""
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(zip([3, *channels], channels, strict=False)):
        stride = 1 if number == len(channels) - 1 else 2
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels[-1], 10))


@contextmanager
def augmented(train_set: Examples, settings: Settings) -> Iterator[tuple[Run, Task]]:
    """Train ``small_network`` with random crops and flips, momentum and a cosine schedule, as is usual for images.

    The batches are stored with the run; the task has the original images, so that labels are judged on those.
    """
    cropped = Cropped(train_set)
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory(prefix="leaveout-reproduce-") as folder:
        torch.manual_seed(settings["seed"])
        model, loss = small_network(settings["channels"]), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=0.9, weight_decay=5e-4)
        steps = settings["epochs"] * -(-settings["n"] // settings["batch"])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        loader = torch.utils.data.DataLoader(cropped, settings["batch"], shuffle=True)
        with Recorder(Path(folder) / "run", model, optimizer) as recorder:
            for _ in range(settings["epochs"]):
                for x, y in recorder.watch(loader):
                    optimizer.zero_grad()
                    loss(model(x), y).backward()
                    optimizer.step()
                    schedule.step()
        yield recorder.finish(), Task(model, loss, train_set)
