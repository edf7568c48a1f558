"""The recorded runs that every tool is asked about, and the truth about them."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leaveout as lo
from experiments.reproduce.problems import narrowed
from experiments.reproduce.words import sequences

DECAY = 0.01
BINARY: dict[str, Any] = {"n": 400, "queries": 400, "batch": 100, "lr": 0.1, "epochs": 30, "replays": 400}
GPT: dict[str, Any] = {"n": 1000, "queries": 50, "batch": 32, "lr": 1e-3, "epochs": 1, "replays": 100}
CNN: dict[str, Any] = {"n": 1024, "queries": 200, "batch": 64, "lr": 0.05, "epochs": 8, "replays": 100}
SUBJECTS: dict[str, dict[str, Any]] = {
    **{
        f"{data}, {kind}": {**BINARY, "data": data, "model": kind}
        for kind in ("logistic", "mlp")
        for data in ("adult", "20news", "mnist-1v7")
    },
    "small GPT": {**GPT, "data": "words", "model": "gpt"},
    "MNIST CNN": {**CNN, "data": "mnist", "model": "mnist-cnn"},
}
QUICK = {"n": 100, "queries": 20, "epochs": 2, "replays": 20}


@dataclass(frozen=True)
class Subject:
    """A recorded run as a tool sees it: the trained model, its states, its data, its loss.

    Args:
        run, task: the record, for leaveout itself.
        model: holds the last weights.
        loss: a mean over a batch, as trained; ``losses`` gives one number per example.
        train, query: inputs and targets.
        ids: the examples whose truth is known.
        settings: what all of this was made from.
    """

    run: lo.Run
    task: lo.Task
    model: nn.Module
    loss: nn.Module
    train: TensorDataset
    query: TensorDataset
    ids: list[int]
    settings: dict[str, Any]

    @property
    def binary(self) -> bool:
        """Whether the model has one logit."""
        return isinstance(self.loss, nn.BCEWithLogitsLoss)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute one loss per example; a sequence's is its tokens' mean."""
        single = type(self.loss)(reduction="none")(outputs, targets)
        return single.flatten(1).mean(1) if single.ndim > 1 else single

    def checkpoints(self) -> list[dict[str, Tensor]]:
        """Return the weights at the end of each epoch, the last included."""
        steps = [self.run.record(step).epoch for step in range(len(self.run))]
        ends = [step + 1 for step in range(len(steps)) if step + 1 == len(steps) or steps[step + 1] != steps[step]]
        return [self.run.state(end)["param"] if end < len(steps) else self.run.final()["param"] for end in ends]

    def copied(self) -> nn.Module:
        """Return a model of its own, for tools that change what they are given."""
        return copy.deepcopy(self.model)


@contextmanager
def recorded(settings: dict[str, Any]) -> Iterator[Subject]:
    """Train and record a subject; the seed draws data, weights and order, so that every call trains the same run."""
    seed = settings["seed"]
    model, loss, train, query = _made(settings)
    task = lo.Task(model, loss, train)
    if settings["model"] == "gpt":
        optimizer = torch.optim.AdamW(model.parameters(), settings["lr"], betas=(0.9, 0.95), weight_decay=DECAY)
    else:
        decay = DECAY if settings["model"] != "mnist-cnn" else 0.0
        optimizer = torch.optim.SGD(model.parameters(), settings["lr"], weight_decay=decay)
    order = torch.Generator().manual_seed(seed)
    ids = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed + 1))[: settings["replays"]]
    with tempfile.TemporaryDirectory(prefix="leaveout-peers-") as folder:
        recorder = lo.Recorder(Path(folder) / "run", model, optimizer)
        for epoch in range(settings["epochs"]):
            for rows in torch.randperm(len(train), generator=order).split(settings["batch"]):
                x, y = train[rows]
                optimizer.zero_grad()
                loss(model(x), y).backward()
                recorder.step(rows, [x, y], epoch=epoch)
                optimizer.step()
        yield Subject(recorder.finish(), task, model, loss, train, query, sorted(ids.tolist()), settings)


def _made(settings: dict[str, Any]) -> tuple[nn.Module, nn.Module, TensorDataset, TensorDataset]:
    seed, n, queries = settings["seed"], settings["n"], settings["queries"]
    if settings["data"] == "words":
        tokens = sequences()
        rows, val, _ = lo.data.split(len(tokens), n, queries, seed)
        train, query = (TensorDataset(tokens[part][:, :-1], tokens[part][:, 1:]) for part in (rows, val))
        return lo.models.build("gpt", seed=seed), nn.CrossEntropyLoss(), train, query
    loaded = lo.data.load(settings["data"], n, queries, seed)
    x, val_x = loaded.train.x, loaded.val.x
    if settings["model"] == "mnist-cnn":
        x, val_x = (part.reshape(-1, 1, 28, 28) for part in (x, val_x))
        loss: nn.Module = nn.CrossEntropyLoss()
        model = lo.models.build("mnist-cnn", seed=seed)
    else:
        loss = nn.BCEWithLogitsLoss()
        model = lo.models.build(settings["model"], seed=seed, features=x.shape[1])
        x, val_x, model = narrowed(x, val_x, model, settings["model"])
        model, x, val_x = model.float(), x.float(), val_x.float()
    return model, loss, TensorDataset(x, loaded.train.y), TensorDataset(val_x, loaded.val.y)
