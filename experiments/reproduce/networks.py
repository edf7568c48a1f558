"""Networks trained in the usual way and recorded: optimizer, schedule and activation come from settings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from experiments.reproduce.spec import Settings
from leaveout.builtin import data, models
from leaveout.run.reader import Run
from leaveout.run.recording.recorder import Recorder
from leaveout.task.task import Task

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
OPTIONS = ("betas", "eps", "weight_decay", "momentum")


@dataclass(frozen=True)
class Trained:
    """A recorded run with its task and queries."""

    run: Run
    task: Task
    val: Dataset


@contextmanager
def network(settings: Settings) -> Iterator[Trained]:
    """Record a run of a fully connected network; the seed draws data, initial weights and order.

    Settings: ``data``, ``n``, ``queries``, ``hidden``, ``activation``, ``dtype``, ``scaled`` (True: inputs minus their
    mean over the training set, divided by their standard deviation, as is usual for images; ``"each"``: every feature
    by its own mean and deviation, as is usual for tables), and what ``trained`` needs.
    """
    seed, dtype = settings["seed"], getattr(torch, settings["dtype"])
    loaded = data.load(settings["data"], settings["n"], settings["queries"], settings.get("data_seed", seed))
    x, val_x = (part.x.flatten(1).to(dtype) for part in (loaded.train, loaded.val))
    if settings.get("scaled"):
        over = 0 if settings["scaled"] == "each" else (0, 1)
        mean, deviation = x.mean(over), x.std(over)
        deviation = torch.where(deviation > 0, deviation, 1.0)  # a pixel that is always empty
        x, val_x = (x - mean) / deviation, (val_x - mean) / deviation
    train_set, val = TensorDataset(x, loaded.train.y), TensorDataset(val_x, loaded.val.y)
    model = models.build(
        "mlp",
        seed=seed,
        features=x.shape[1],
        hidden=tuple(settings["hidden"]),
        outputs=len(loaded.classes),
        activation=settings["activation"],
    ).to(dtype)
    with trained(model, train_set, val, settings) as problem:
        yield problem


@contextmanager
def trained(model: nn.Module, train_set: TensorDataset, val: TensorDataset, settings: Settings) -> Iterator[Trained]:
    """Train a model with ``optimizer``, ``lr``, its options, ``schedule``, ``epochs``, ``batch``, ``seed``.

    ``schedule`` is ``"constant"``, or ``"linear"`` for a rate that falls to zero; ``clip_norm`` the largest norm of a
    gradient, if any.
    """
    options = {name: settings[name] for name in OPTIONS if settings.get(name) is not None}
    optimizer = OPTIMIZERS[settings["optimizer"]](model.parameters(), lr=settings["lr"], **options)
    order = torch.Generator().manual_seed(settings["seed"])
    batches = [
        (epoch, ids)
        for epoch in range(settings["epochs"])
        for ids in torch.randperm(len(train_set), generator=order).split(settings["batch"])
    ]
    falls = settings.get("schedule", "constant") == "linear"
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - falls * step / len(batches))
    loss, clip = nn.CrossEntropyLoss(), settings.get("clip_norm")
    task = Task(model, loss, train_set, clip_norm=clip)
    with tempfile.TemporaryDirectory(prefix="leaveout-reproduce-") as folder:
        recorder = Recorder(Path(folder) / "run", model, optimizer)
        for epoch, ids in batches:
            x, y = (tensor[ids] for tensor in train_set.tensors)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            recorder.step(ids, [x, y], epoch=epoch)
            optimizer.step()
            schedule.step()
        yield Trained(recorder.finish(), task, val)
