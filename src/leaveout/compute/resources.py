"""How work is done, as opposed to what is computed: memory budget, engine, shards, progress."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from leaveout._util.amounts import parse_bytes
from leaveout.compute import progress
from leaveout.compute.clock import Clock
from leaveout.compute.engines import Engine, Local, engine_of
from leaveout.errors import InputError, is_whole

T = TypeVar("T")
R = TypeVar("R")

ROWS, VECTORS, SHARD_BYTES = 64, 16, 500_000_000
"""The size of a shard that goes to another process or is stored: the same wherever it is computed."""

BESIDE = 32_000_000
"""Memory that scoring may need besides its budget: traces and other generated code, and allocator overhead."""


def shard_rows(bytes_each: int, most: int = ROWS) -> int:
    """Return how many rows or queries of this size make a shard, wherever it is computed.

    >>> shard_rows(1), shard_rows(100_000_000), shard_rows(10**12)
    (64, 5, 1)
    """
    return max(1, min(most, SHARD_BYTES // max(1, bytes_each)))


@dataclass(frozen=True)
class Resources:
    """What an estimator may use.

    Args:
        memory: the most memory to use, like ``"2GB"``, besides what is used already, the result (scores, and
            displacements if requested), the states of the run between two kept ones with a shard of its files, and
            32 MB for traces and other code. Larger work is split into chunks that fit; what does not fit is kept in
            temporary files. A budget too small for one vector and its product is refused, with the least that is
            needed. ``"auto"`` is half of what is free, on the GPU if the model is there. Each worker of an engine has
            this budget.
        progress: show progress bars; by default on a terminal and in a notebook only.
        engine: where shards of work are done: ``"local"``, ``"ray"``, ``Local(processes)`` or ``Ray(address)``.
        work: a directory where finished shards are stored. The same work, started again after a crash, continues from
            there. They stay when all is done: delete the directory when the scores are saved.
        shard: rows or query vectors per shard. By default as many as fit into memory, or at most 64 rows or 16 vectors
            if shards go to other processes or are stored. Shards of the same size give the same scores to the last
            bit, others the same up to rounding. No shard is larger than the budget, or with ``"auto"`` than 500 MB:
            the memory that is free at the moment does not change the shards.
        checkpoint: the file in which a sweep saves its progress; each stored shard gets its own.
        device: where the model is, whose memory this is about; estimators set it.
        clock: counts the time that is left; work that seems to take longer stops with OutOfTimeError.
    """

    memory: str | int = "auto"
    progress: bool | None = None
    engine: str | Engine = "local"
    work: str | Path | None = None
    shard: int | None = None
    checkpoint: Path | None = None
    device: torch.device | None = None
    clock: Clock | None = None

    def __post_init__(self) -> None:
        if self.memory != "auto":
            parse_bytes(self.memory)
        if self.shard is not None and not is_whole(self.shard, 1):
            raise InputError(
                f"shard={self.shard!r} is not a number of rows: give a whole number of at least 1, or None.",
                code="shard-not-a-count",
            )
        if self.work is not None and not isinstance(self.work, str | os.PathLike):
            raise InputError(
                f"work={self.work!r} is not a place for shards: give a directory.", code="work-not-a-directory"
            )
        object.__setattr__(self, "engine", engine_of(self.engine))

    @property
    def bytes(self) -> int:
        """The budget in bytes."""
        return free_memory(self.device) // 2 if self.memory == "auto" else parse_bytes(self.memory)

    def on(self, device: torch.device) -> Resources:
        """Return the same for a model on this device, whose memory counts."""
        return replace(self, device=device)

    def chunk(self, bytes_each: int, count: int) -> int:
        """Return how many of ``count`` items of this size fit into the budget, at least one."""
        return max(1, min(count, self.bytes // max(1, bytes_each)))

    def divided(self, parts: int) -> Resources:
        """Return the same with the budget divided among several things held together; ``"auto"`` stays the same."""
        return self if self.memory == "auto" else replace(self, memory=max(1, self.bytes // parts))

    def without(self, held: int) -> Resources:
        """Return the same with a budget smaller by what is held throughout; ``"auto"`` stays the same."""
        return self if self.memory == "auto" else replace(self, memory=max(1, self.bytes - held))

    def check(self, least: int, what: str) -> None:
        """Refuse a budget that is smaller than the minimum for the work."""
        if self.memory != "auto" and self.bytes < least:
            raise InputError(
                f"memory={self.memory!r} is too little: {what} at a time needs at least {least} bytes "
                f"({math.ceil(least / 1e6):,} MB); allow as much.",
                code="memory-too-small",
            )

    @property
    def whole(self) -> bool:
        """Say whether work is done in this process in one piece, as far as memory allows."""
        return self.shard is None and self.work is None and not self.elsewhere

    @property
    def elsewhere(self) -> bool:
        """Say whether work is done in other processes."""
        return self._engine.elsewhere

    @property
    def _engine(self) -> Engine:
        return engine_of(self.engine)

    @property
    def same_disk(self) -> bool:
        """Say whether the workers see this machine's files."""
        return self._engine.same_disk

    def shard_size(self, bytes_each: int, count: int, most: int = ROWS) -> int:
        """Return how many of ``count`` rows or queries of this size make a shard: ``most`` unless ``shard`` is set."""
        fits = self.part(bytes_each, count)
        return fits if self.whole else min(fits, self.shard or shard_rows(bytes_each, most))

    def part(self, bytes_each: int, count: int) -> int:
        """Return how many of ``count`` items of this size are processed at a time, at least one.

        If shards are stored or sent, this does not depend on the free memory: the next process must find them again.
        """
        if self.whole or self.memory != "auto":
            return self.chunk(bytes_each, count)
        return shard_rows(bytes_each, count)

    def inside(self) -> Resources:
        """Return the resources for the work inside a shard."""
        quiet = False if self.elsewhere else self.progress
        clock = None if self.elsewhere else self.clock
        return replace(self, progress=quiet, engine=Local(), work=None, shard=None, clock=clock)

    def within(self, clock: Clock) -> Resources:
        """Return the same for work that has to end before the clock's time is over."""
        return replace(self, clock=clock)

    def started(self, seconds: float) -> Clock:
        """Return a clock for a budget of so many seconds."""
        return Clock(seconds, elsewhere=self.elsewhere)

    def with_checkpoint(self, file: Path | None) -> Resources:
        """Return the same with a checkpoint file."""
        return replace(self, checkpoint=file)

    def map(self, function: Callable[[T], R], items: Sequence[T], what: str) -> Iterator[tuple[int, R]]:
        """Yield (position, result) of every item as the engine finishes it, with one bar for all workers."""
        return self.track(self._engine.run(function, items), len(items), what)

    def track(self, items: Iterable[T], total: int, what: str) -> Iterator[T]:
        """Yield the items, with a bar that shows rate and remaining time."""
        return progress.track(self.watch(items, total), total, what, self.progress)

    def watch(self, items: Iterable[T], total: int) -> Iterable[T]:
        """Return the items; going through them stops if they seem to take longer than the time left."""
        return items if self.clock is None else self.clock.watch(items, total)


def free_memory(device: torch.device | None = None) -> int:
    """Return the bytes that can be allocated on a GPU, or without swapping; 4 GB if the system does not say."""
    if device is not None and device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        match = None
    return int(match[1]) * 1024 if match else 4 * 10**9


def return_memory() -> None:
    """Return freed memory to the system now, including memory between blocks in use, where glibc allocates it."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
