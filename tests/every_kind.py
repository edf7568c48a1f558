"""Trainings that have together what real runs have, as a user would write them; each small, and alone in the file.

python every_kind.py <folder>: begins each of them there, and is killed (SIGKILL) in the middle of each.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import leaveout as lo

SIZE, BATCH, EPOCHS = 24, 4, 4
WEIGHT = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)


class Examples(Dataset):
    """Examples with their numbers; augmented anew each time they are read, if so told."""

    def __init__(self, dtype: torch.dtype, augment: bool = False) -> None:
        order = torch.Generator().manual_seed(0)
        self.x = torch.randn(SIZE, 5, dtype=torch.float64, generator=order).to(dtype)
        self.y, self.augment = torch.randint(3, (SIZE,), generator=order), augment

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int):
        noise = torch.from_numpy(0.1 * np.random.randn(5)) if self.augment else 0
        return self.x[i] + noise, self.y[i], torch.tensor(i)


class Net(nn.Module):
    """BatchNorm, dropout, a layer that is left out at random, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.middle, self.last = (
            nn.Linear(5, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        )
        self.unused = nn.Parameter(torch.ones(2))
        self.double()

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        x = F.dropout(x, 0.2, self.training)
        if not self.training or float(torch.rand(())) < 0.7:
            x = x + torch.tanh(self.middle(x))
        return self.last(x)


def small(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).to(dtype)


def forward(model: nn.Module, batch):
    return model(batch[0]), batch[1]


class Training:
    """One training.

    Args:
        path: where it is recorded; None for a plain training.
        out: the example that a plain training leaves out.
        options: the recorder's.
    """

    dtype = torch.float64
    augment = False
    options: ClassVar[dict] = {}
    at = None
    dies = 7

    def __init__(self, path: Path | None = None, *, out: int = -1, **options) -> None:
        self.model = self.net()
        self.optimizer = self.made(self.model.parameters())
        self.average = self.averaged()
        self.out, self.step, self.killed = out, 0, -1
        self.recorder: lo.Recorder | None = None
        if path is not None:
            self.recorder = lo.Recorder(path, self.model, self.optimizer, average=self.average, **options)
            self.step = self.recorder.done

    @classmethod
    def net(cls) -> nn.Module:
        return small(cls.dtype)

    def made(self, params) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, 0.2, momentum=0.5)

    def averaged(self) -> AveragedModel | None:
        return None

    @classmethod
    def data(cls) -> Examples:
        return Examples(cls.dtype, cls.augment)

    @classmethod
    def query(cls) -> TensorDataset:
        order = torch.Generator().manual_seed(9)
        x = torch.randn(6, 5, dtype=torch.float64, generator=order).to(cls.dtype)
        return TensorDataset(x, torch.randint(3, (6,), generator=order), torch.arange(6))

    @classmethod
    def task(cls, **options) -> lo.Task:
        return lo.Task(cls.net(), cls.loss(), cls.data(), forward=forward, **{**cls.options, **options})

    @classmethod
    def loss(cls) -> nn.Module:
        return nn.CrossEntropyLoss()

    def losses(self, batch) -> torch.Tensor:
        """Each example's loss, zero for the one that is left out, divided as the training divides them."""
        losses = F.cross_entropy(self.model(batch[0]), batch[1], reduction="none")
        return torch.where(batch[2] == self.out, 0.0, 1.0).to(losses) * losses / len(losses)

    def train(self) -> Training:
        """Take all epochs."""
        np.random.seed(3)
        torch.manual_seed(4)
        loader = DataLoader(self.data(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(2))
        batches = loader if self.recorder is None else self.recorder.watch(loader)
        for _ in range(EPOCHS):
            self.epoch(batches)
        return self

    def epoch(self, batches) -> None:
        for batch in batches:
            self.before()
            self.optimizer.zero_grad()
            self.losses(batch).sum().backward()
            self.optimizer.step()
            self.after()

    def before(self) -> None:
        """Come to a step: here the training is killed, some steps after the last that is surely on disk."""
        if self.step == self.killed - 2 and self.recorder is not None:
            self.recorder.flush()
        if self.step == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self) -> None:
        """Count the step, and average the weights."""
        self.step += 1
        if self.average is not None:
            self.average.update_parameters(self.model)

    def query_loss(self) -> float:
        """The loss of the queries under the model that is scored."""
        model = (self.model if self.at is None else self.average.module).eval()
        x, y, _ = self.query().tensors
        with torch.no_grad():
            return float(F.cross_entropy(model(x), y))


class Together(Training):
    """Augmentation, BatchNorm, dropout, layers left out, class weights, windows, clipping, AdamW, freezing, EMA."""

    augment = True
    options: ClassVar[dict] = {"clip_norm": 0.5, "clip_value": 0.2}
    at = "average"

    @classmethod
    def net(cls) -> nn.Module:
        return Net()

    def made(self, params) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, 0.03, eps=1e-3)

    def averaged(self) -> AveragedModel:
        return AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)

    @classmethod
    def loss(cls) -> nn.Module:
        return nn.CrossEntropyLoss(weight=WEIGHT)

    def losses(self, batch) -> torch.Tensor:
        losses = F.cross_entropy(self.model(batch[0]), batch[1], weight=WEIGHT, reduction="none")
        return torch.where(batch[2] == self.out, 0.0, 1.0) * losses / WEIGHT[batch[1]].sum()

    def epoch(self, batches) -> None:
        parts = 0
        for batch in batches:
            if parts == 0:
                self.before()
                for param in self.model.first.parameters():
                    param.requires_grad_(not 5 <= self.step < 8)
                self.optimizer.zero_grad()
            (self.losses(batch).sum() / 2).backward()
            parts += 1
            if parts == 2:
                nn.utils.clip_grad_value_(self.model.parameters(), 0.2)
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.after()
                parts = 0


class Closures(Training):
    """Steps by a closure, with the average of the last weights (SWA)."""

    at = "average"

    def averaged(self) -> AveragedModel:
        return AveragedModel(self.model)

    def epoch(self, batches) -> None:
        for batch in batches:
            self.before()

            def closure(batch=batch):
                self.optimizer.zero_grad()
                loss = self.losses(batch).sum()
                loss.backward()
                return loss

            self.optimizer.step(closure)
            self.after()


class Bfloat16(Training):
    """``torch.autocast`` in bfloat16."""

    dtype, cast = torch.float32, torch.bfloat16

    def losses(self, batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype=self.cast):
            return super().losses(batch)


class Float16(Bfloat16):
    """The same in float16, with a gradient scaler whose first steps overflow."""

    cast = torch.float16
    dies = 10  # the first are skipped

    def epoch(self, batches) -> None:
        if not hasattr(self, "scaler"):
            before = None if self.recorder is None else self.recorder.before
            scale = 2.0**24 if before is None else before.record(len(before) - 1).scale
            self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=2.0**-6, growth_interval=1000)
        for batch in batches:
            self.before()
            self.optimizer.zero_grad()
            self.scaler.scale(self.losses(batch).sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.after()


KINDS = {"together": Together, "closures": Closures, "bfloat16": Bfloat16, "float16": Float16}


def main(folder: str) -> None:
    """Begin each of them and die in its middle."""
    from leaveout.run.recording import writer

    writer.SHARD_STEPS = 2
    torch.set_num_threads(1)
    for name, kind in KINDS.items():
        child = os.fork()
        if child == 0:
            training = kind(Path(folder) / name)
            training.killed = kind.dies
            training.train()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, name


if __name__ == "__main__":
    main(sys.argv[1])
