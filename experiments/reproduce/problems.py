"""Trained runs from settings: data, noise, model, optimizer, all by name and seed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.reproduce.spec import Settings
from leaveout.builtin import data, models
from leaveout.builtin.data import Examples
from leaveout.compute.resources import Resources
from leaveout.run.reader import Run
from leaveout.run.train import train
from leaveout.task.task import Task

QUIET = Resources(progress=False, memory="3GB")


@dataclass(frozen=True)
class Problem:
    """A recorded run with its task and queries."""

    run: Run
    task: Task
    val: Examples


@contextmanager
def binary(settings: Settings) -> Iterator[Problem]:
    """Train a two-class problem of the tables; the run's files are deleted when the block ends.

    The seed draws the split, the noise, the initial weights and the order of the batches.
    """
    seed, dtype = settings["seed"], getattr(torch, settings["dtype"])
    dataset = data.load(settings["data"], n_train=settings["n"], n_val=settings["n"], seed=seed)
    noisy = corrupted(dataset.train, settings["data"], settings["noise"], settings["level"], seed)
    model = models.build(settings["model"], seed=seed, features=noisy.x.shape[1])
    x, val_x = noisy.x, dataset.val.x
    if settings.get("optimizer") != "adam":  # Adam's steps depend on the coordinates
        x, val_x, model = narrowed(x, val_x, model, settings["model"])
    model.to(dtype)
    train_set, val = (
        Examples(part.to(dtype), examples.y.to(dtype), examples.ids)
        for part, examples in ((x, noisy), (val_x, dataset.val))
    )
    with trained(model, nn.BCEWithLogitsLoss(), train_set, val, settings) as problem:
        yield problem


@contextmanager
def trained(
    model: nn.Module, loss: nn.Module, train_set: Examples, val: Examples, settings: Settings
) -> Iterator[Problem]:
    """Train a model by SGD, or by Adam if so named, with ``lr``, ``epochs``, ``batch``, ``l2`` and ``seed``."""
    task = Task(model, loss, train_set, l2=settings["l2"])
    kind = torch.optim.Adam if settings.get("optimizer") == "adam" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=settings["lr"])
    with tempfile.TemporaryDirectory(prefix="leaveout-reproduce-") as folder:
        run = train(
            *(task, optimizer, settings["epochs"], settings["batch"], settings["seed"], Path(folder) / "run"),
            resources=QUIET,
        )
        yield Problem(run, task, val)


def corrupted(examples: Examples, name: str, noise: str, level: float, seed: int) -> Examples:
    """Corrupt the training examples with ``"clean"``, ``"feature"`` or ``"label"`` noise of a level.

    Feature noise on 20News sets entries to 1, like words that the message does not contain; elsewhere it is Gaussian.
    """
    if noise == "clean":
        return examples
    if noise == "label":
        return data.flip(examples, level, seed).examples
    return (data.ones if name == "20news" else data.gaussian)(examples, level, seed).examples


def narrowed(x: Tensor, val: Tensor, model: nn.Module, kind: str) -> tuple[Tensor, Tensor, nn.Module]:
    """Write the same problem in fewer coordinates, if there are more features than examples.

    With Q an orthonormal basis of all rows, x = Q(Qᵀx): a first layer W sees x as WQ sees Qᵀx. The part of W outside
    the span affects no example, training or query, and only shrinks by the L2 term; all losses, gradients and scores
    are the same in the coordinates Qᵀx, which are fewer and therefore cheaper.
    """
    rows = torch.cat([x, val]).double()
    if len(rows) >= rows.shape[1]:
        return x, val, model
    basis = torch.linalg.qr(rows.T).Q
    narrow = models.build(kind, features=basis.shape[1])
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    first = next(name for name, tensor in weights.items() if tensor.ndim == 2)
    narrow.load_state_dict({**weights, first: weights[first] @ basis})
    return rows[: len(x)] @ basis, rows[len(x) :] @ basis, narrow
