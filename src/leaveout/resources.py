"""How work is done, as opposed to what is computed: memory budget, progress, and the account of what it cost."""

from __future__ import annotations

import math
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from leaveout.engine import Engine, Local, engine_of
from leaveout.errors import InputError, is_whole

T = TypeVar("T")
R = TypeVar("R")

ROWS, VECTORS, SHARD_BYTES = 64, 16, 500_000_000
"""What makes a shard that goes to another process or is kept: the same wherever it is done."""

MOMENT = 1.0
"""Seconds that work may take without a bar."""

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def shard_rows(bytes_each: int, most: int = ROWS) -> int:
    """How many rows or queries of this size make a shard, whoever works on it.

    >>> shard_rows(1), shard_rows(100_000_000), shard_rows(10**12)
    (64, 5, 1)
    """
    return max(1, min(most, SHARD_BYTES // max(1, bytes_each)))


def parse_bytes(amount: str | int, what: str = "memory") -> int:
    """Bytes in words.

    >>> parse_bytes("2GB"), parse_bytes("1.5 kB"), parse_bytes(64)
    (2000000000, 1500, 64)
    """
    if is_whole(amount, 1):
        return int(amount)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", str(amount), re.IGNORECASE)
    found = float(match[1]) * UNITS[match[2].upper()] if match else 0.0
    if not 1 <= found < math.inf:
        raise InputError(f"{what}={repr(amount)[:40]} is not an amount of bytes: write it like '2GB' or 500_000_000.")
    return int(found)


@dataclass(frozen=True)
class Resources:
    """What an estimator may use.

    Args:
        memory: budget for what is held beyond the run itself, like ``"2GB"``; longer work is cut into chunks that fit.
            ``"auto"`` is half of what the machine has free. Each worker of an engine has this budget.
        progress: show progress bars; by default only on a terminal.
        engine: where shards of work are done: ``"local"``, ``"ray"``, ``Local(processes)`` or ``Ray(address)``.
        work: a directory where finished shards are kept. The same work, begun again after a crash, goes on from there.
            They stay when all is done: delete the directory when the scores are saved.
        shard: rows or query vectors in a shard. By default as many as memory holds, or at most 64 rows or 16 vectors
            where shards go to other processes or are kept. Shards of the same size give the same scores to the last
            bit, others the same but for rounding. No shard is larger than the budget, or with ``"auto"`` than 500 MB:
            what is free at the moment does not change the shards.
        mark: the file in which a sweep notes how far it is; told to each shard that is kept.
    """

    memory: str | int = "auto"
    progress: bool | None = None
    engine: str | Engine = "local"
    work: str | Path | None = None
    shard: int | None = None
    mark: Path | None = None

    def __post_init__(self) -> None:
        if self.memory != "auto":
            parse_bytes(self.memory)
        if self.shard is not None and not is_whole(self.shard, 1):
            raise InputError(f"shard={self.shard!r} is no number of rows: give at least 1, or None.")
        if self.work is not None and not isinstance(self.work, str | os.PathLike):
            raise InputError(f"work={self.work!r} is no place for shards: give a directory.")
        object.__setattr__(self, "engine", engine_of(self.engine))

    @property
    def bytes(self) -> int:
        """The budget."""
        return free_memory() // 2 if self.memory == "auto" else parse_bytes(self.memory)

    def chunk(self, bytes_each: int, count: int) -> int:
        """How many of ``count`` things of this size fit into the budget, at least one."""
        return max(1, min(count, self.bytes // max(1, bytes_each)))

    @property
    def whole(self) -> bool:
        """Whether work is done in one piece here, as far as memory holds it."""
        return self.shard is None and self.work is None and not self.elsewhere

    @property
    def elsewhere(self) -> bool:
        """Whether work is done in other processes."""
        return self._engine.elsewhere

    @property
    def _engine(self) -> Engine:
        return engine_of(self.engine)

    @property
    def same_disk(self) -> bool:
        """Whether those who work see this machine's files."""
        return self._engine.same_disk

    def shard_size(self, bytes_each: int, count: int, most: int = ROWS) -> int:
        """How many of ``count`` rows or queries of this size make a shard, ``most`` of them unless it is told."""
        fits = self.part(bytes_each, count)
        return fits if self.whole else min(fits, self.shard or shard_rows(bytes_each, most))

    def part(self, bytes_each: int, count: int) -> int:
        """How many of ``count`` things of this size are worked on at a time, at least one.

        Where shards are kept or sent, what is free at the moment has no say: the next process must find them again.
        """
        if self.whole or self.memory != "auto":
            return self.chunk(bytes_each, count)
        return shard_rows(bytes_each, count)

    def inside(self) -> Resources:
        """What a shard may use while it is worked on."""
        quiet = False if self.elsewhere else self.progress
        return replace(self, progress=quiet, engine=Local(), work=None, shard=None)

    def marked(self, file: Path | None) -> Resources:
        """The same with a place for notes."""
        return replace(self, mark=file)

    def map(self, function: Callable[[T], R], items: Sequence[T], what: str) -> Iterator[tuple[int, R]]:
        """(position, result) of every item as it is done, by the engine, with one bar for the work of all workers."""
        return self.track(self._engine.run(function, items), len(items), what)

    def track(self, items: Iterable[T], total: int, what: str) -> Iterator[T]:
        """The items, with a bar that shows rate and remaining time."""
        console = Console(stderr=True)
        wanted = console.is_terminal if self.progress is None else self.progress
        return _shown(items, total, what, console) if wanted and not _SHOWING else iter(items)


_SHOWING: list[str] = []
"""What the bar on the screen is about: work within other work shows none of its own."""


class _Rate(ProgressColumn):
    """Steps a second, or seconds a step."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if not speed else f"{speed:,.0f}/s" if speed >= 10 else f"{1 / speed:,.2g} s each")


def _shown(items: Iterable[T], total: int, what: str, console: Console) -> Iterator[T]:
    """The items, with a bar as soon as they have taken longer than a moment; it goes away when they are done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=console.is_terminal)
    task = bar.add_task(what, total=total)
    timer = threading.Timer(MOMENT, bar.start)
    timer.daemon = True
    _SHOWING.append(what)
    timer.start()
    try:
        for item in items:
            yield item
            bar.advance(task)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
        _SHOWING.remove(what)


@dataclass
class Cost:
    """What a computation took.

    ``hvps`` counts Hessian-vector products over a batch (one product for each of a batch's examples counts as one),
    ``gradients`` batch gradients in the same way.
    """

    hvps: int = 0
    gradients: int = 0
    seconds: float = 0.0
    peak_memory: int = field(default=0)

    def __add__(self, other: Cost) -> Cost:
        """Both, one after the other."""
        return Cost(
            self.hvps + other.hvps,
            self.gradients + other.gradients,
            self.seconds + other.seconds,
            max(self.peak_memory, other.peak_memory),
        )

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Adds the time of a block, and notes the process's largest resident size during it."""
        _reset_peak()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start
            self.peak_memory = max(self.peak_memory, _peak())


def free_memory() -> int:
    """Bytes that can be had without pushing anything out, or 4 GB where the system does not say."""
    try:
        known = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        known = None
    return int(known[1]) * 1024 if known else 4 * 10**9


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # not Linux, or not allowed: the peak is then that of the whole process so far


def _peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
