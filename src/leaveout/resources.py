"""How work is done, as opposed to what is computed: memory budget, progress, and the account of what it cost."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from leaveout.errors import InputError

T = TypeVar("T")

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_bytes(amount: str | int, what: str = "memory") -> int:
    """Bytes in words.

    >>> parse_bytes("2GB"), parse_bytes("1.5 kB"), parse_bytes(64)
    (2000000000, 1500, 64)
    """
    if isinstance(amount, int) and amount > 0:
        return amount
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", str(amount), re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise InputError(f"{what}={amount!r} is not an amount of bytes: write it like '2GB' or 500_000_000.")
    return int(float(match[1]) * UNITS[match[2].upper()])


@dataclass(frozen=True)
class Resources:
    """What an estimator may use.

    Args:
        memory: budget for what is held beyond the run itself, like ``"2GB"``; longer work is cut into chunks that fit.
            ``"auto"`` is half of what the machine has free.
        progress: show progress bars; by default only on a terminal.
    """

    memory: str | int = "auto"
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.memory != "auto":
            parse_bytes(self.memory)

    @property
    def bytes(self) -> int:
        """The budget."""
        return free_memory() // 2 if self.memory == "auto" else parse_bytes(self.memory)

    def chunk(self, bytes_each: int, count: int) -> int:
        """How many of ``count`` things of this size fit into the budget, at least one."""
        return max(1, min(count, self.bytes // max(1, bytes_each)))

    def track(self, items: Iterable[T], total: int, what: str) -> Iterator[T]:
        """The items, with a bar that shows rate and remaining time."""
        console = Console(stderr=True)
        if not (console.is_terminal if self.progress is None else self.progress):
            yield from items
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            yield from progress.track(items, total=total, description=what)


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
