"""Long and wide runs: very many recorded steps, and very many examples in one scoring pass, with memory monitored."""

from __future__ import annotations

import json
import os
import platform
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from experiments.bench.problems import QUIET, folder, seconds
from experiments.bench.table import load_table
from leaveout._util.files import write_text
from leaveout.compute.resources import Resources
from leaveout.estimators import ACC, SGDIE
from leaveout.run.reader import open_run
from leaveout.run.train import train
from leaveout.task.task import Task

SETTLED = 0.5
"""The share of the time after which resident memory should no longer grow."""

HEAD = """# Load

Measured by `python -m experiments load`, which runs for as long as it takes and watches its own resident memory. Growth
is the slope of a straight line through the second half of the samples: what each step adds once memory has settled.
ACC is accumulative SGD-influence estimation ([methods](methods.md)).

"""

NOTES = """
CPU time is what counts on a machine that is busy with other things; "per step" is CPU time. While recording, states
wait in memory until they fill a shard (16 MB, 4096 steps or 10 seconds): memory rises until the first shard is written,
and then only when a shard is larger than those before it. While scoring, memory follows the shard being read, up as its
pages are touched and down at the next one: a slope of a few hundred bytes, where a state has ten thousand, only
reflects where in this sawtooth the samples begin and end. A leak of one state per step would show as 10 KB.
"""
EPOCHS = 12
"""Epochs of the wide run: enough for several shards."""


class Resident:
    """Samples of this process's resident memory."""

    def __init__(self, every: float = 0.1) -> None:
        self._every, self._stop = every, threading.Event()
        self.samples: list[tuple[float, int]] = []

    def _sample(self) -> None:
        while True:  # no sample at the end, when what was held is free again
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.samples.append((perf_counter(), pages * os.sysconf("SC_PAGE_SIZE")))
            if self._stop.wait(self._every):
                return

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Sample within this context."""
        thread = threading.Thread(target=self._sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    @property
    def peak(self) -> int:
        """The largest sample."""
        return max(size for _, size in self.samples)

    def growth(self, steps: int) -> float:
        """Estimate the growth in bytes per step once memory has settled, if all steps take the same time."""
        time, size = np.array(self.samples).T
        time = time - time[0]
        late = time >= SETTLED * time[-1]
        if late.sum() < 2:
            return float("nan")  # over too soon to tell
        slope = np.polyfit(time[late], size[late], 1)[0]
        return float(slope * time[-1] / steps)


def watched(what: str, steps: int, function: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """Call a function of so many steps; return what it cost, and its result."""
    resident = Resident()
    used = process_time()
    with resident.watched():
        elapsed, result = seconds(function)
    figures = {"what": what, "steps": steps, "seconds": elapsed, "processor": process_time() - used}
    return {**figures, "peak": resident.peak, "growth": resident.growth(steps)}, result


def long_run(steps: int) -> Iterator[dict[str, Any]]:
    """Record, open and score very many steps of a small model."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 8, generator=generator)
    data = TensorDataset(x, (x.sum(1) + torch.randn(1000, generator=generator) > 0).float())
    model = nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))
    task = Task(model, nn.BCEWithLogitsLoss(), data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    path = folder()
    figures, run = watched(
        f"{steps:,} steps recorded, logistic regression with 9 parameters, batches of 10",
        steps,
        lambda: train(task, optimizer, steps // 100, 10, 0, path, resources=QUIET),
    )
    yield {**figures, "case": "long", "disk": sum(file.stat().st_size for file in path.iterdir())}
    del run
    figures, _ = watched(
        "the same run opened and scored by SGD-IE, one query",
        steps,
        lambda: SGDIE().score(open_run(path), task, TensorDataset(*data[:100]), resources=QUIET),
    )
    yield {**figures, "case": "long"}
    shutil.rmtree(path.parent)


def wide_run(examples: int, *, width: int = 64, size: int = 1000) -> Iterator[dict[str, Any]]:
    """Score very many examples in one pass, each remembered in a projection."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, 64, generator=generator)
    data = TensorDataset(x, (x[:, :10] + torch.randn(examples, 10, generator=generator)).argmax(1))
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    task = Task(model, nn.CrossEntropyLoss(), data)
    path = folder()
    count = sum(param.numel() for param in model.parameters())
    steps = EPOCHS * -(-examples // size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    figures, run = watched(
        f"{EPOCHS} epochs of {examples:,} examples recorded, network with {count:,} parameters, batches of {size:,}",
        steps,
        lambda: train(task, optimizer, EPOCHS, size, 0, path, resources=QUIET),
    )
    yield {**figures, "case": "wide", "disk": sum(file.stat().st_size for file in path.iterdir())}
    query = TensorDataset(*data[:1000])
    figures, _ = watched(
        f"the same run scored by ACC(sketch={width}), one pass, {examples:,} scores",
        steps,
        lambda: ACC(sketch=width).score(run, task, query, resources=Resources("2GB", progress=False)),
    )
    yield {**figures, "case": "wide"}
    shutil.rmtree(path.parent)


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """Write ``load.json`` and ``load.md``; cases that were not measured this time keep their figures."""
    machine = f"Threads: {torch.get_num_threads()}; PyTorch {torch.__version__}, Python {platform.python_version()}."
    out.mkdir(parents=True, exist_ok=True)
    measured = {row["case"] for row in rows}
    if (before := out / "load.json").exists():
        rows = [*(row for row in json.loads(before.read_text())["rows"] if row["case"] not in measured), *rows]
    write_text(out / "load.json", json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    write_text(out / "load.md", "\n".join([HEAD + machine, "", *load_table(rows)]) + "\n" + NOTES)
