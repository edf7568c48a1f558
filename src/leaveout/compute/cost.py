"""What a computation cost: products, gradients, seconds, memory."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Cost:
    """What a computation cost.

    ``hvps`` counts Hessian-vector products over a batch (one product per example of a batch counts as one in total),
    ``gradients`` counts batch gradients in the same way.
    """

    hvps: int = 0
    gradients: int = 0
    seconds: float = 0.0
    peak_memory: int = field(default=0)

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of both, done one after the other."""
        return Cost(
            self.hvps + other.hvps,
            self.gradients + other.gradients,
            self.seconds + other.seconds,
            max(self.peak_memory, other.peak_memory),
        )

    @contextmanager
    def metered(self, device: torch.device) -> Iterator[None]:
        """Add the time of a block, and note its peak memory: of the GPU if it computes there, else the process's."""
        gpu = device if device.type == "cuda" else None
        _reset_peak(gpu)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start
            self.peak_memory = max(self.peak_memory, _peak(gpu))


def _reset_peak(gpu: torch.device | None) -> None:
    if gpu is not None:
        torch.cuda.reset_peak_memory_stats(gpu)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # not Linux, or not allowed: the peak is then that of the whole process so far


def _peak(gpu: torch.device | None) -> int:
    if gpu is not None:
        return torch.cuda.max_memory_allocated(gpu)
    try:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
