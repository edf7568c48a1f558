"""Shared parts of the integrations: loaders that remember what they yielded, and resuming."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from leaveout.errors import LeaveoutWarning
from leaveout.run.manifest import MANIFEST
from leaveout.run.recording.watched_loader import IndexedLoader, NotingSampler, check_loader


class Tap:
    """A loader that replaces another: the same batches, each remembered with its ids until it is used.

    Trainers prefetch batches, so the batch drawn last is not the one the model gets next. Batches are used in the
    order in which they are drawn.

    >>> from torch.utils.data import TensorDataset
    >>> tap = Tap(DataLoader(TensorDataset(torch.arange(4.0)), 2))
    >>> ahead = list(tap)
    >>> tap.next()[0], tap.next()[0], tap.next()
    (tensor([0, 1]), tensor([2, 3]), None)
    """

    def __init__(self, loader: DataLoader, epoch: int = 0) -> None:
        self._indexed = IndexedLoader(loader)
        self._drawn: deque[tuple[Tensor, Any]] = deque()
        self._epochs = [epoch - 1]

    @property
    def loader(self) -> DataLoader:
        """The loader that it replaces."""
        return self._indexed.loader

    @property
    def epoch(self) -> int:
        """The current epoch; by default counted from 0."""
        return max(self._epochs[0], 0)

    def over(self, loader: DataLoader) -> Tap:
        """Return a tap on a loader for the rest of an epoch; its batches are reported by this one too."""
        other = Tap(loader)
        other._drawn, other._epochs = self._drawn, self._epochs
        return other

    def __iter__(self) -> Iterator[Any]:
        self._drawn.clear()
        self._epochs[0] += 1
        for ids, batch in self._indexed:
            self._drawn.append((ids, batch))
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def next(self) -> tuple[Tensor, Any] | None:
        """Return the ids and batch that are used next, and remove them from the queue; None if there are none."""
        return self._drawn.popleft() if self._drawn else None


class NotedLoader:
    """Makes a loader record what it draws, in place, for trainers that pass each batch to their callbacks.

    >>> from torch.utils.data import TensorDataset
    >>> loader = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    >>> noted = NotedLoader(loader)
    >>> _ = list(loader)
    >>> noted.next(), noted.next()
    ([0, 1], [2, 3])
    """

    def __init__(self, loader: DataLoader) -> None:
        check_loader(loader)
        self.loader = loader
        self._drawn: deque[list[int]] = deque()
        self._attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler = getattr(loader, self._attribute)
        # DataLoader forbids setting these; it uses whatever is there when an iteration begins.
        loader.__dict__[self._attribute] = _Anew(self._sampler, self._drawn)

    def next(self) -> list[int]:
        """Return the ids of the next batch that is used."""
        return self._drawn.popleft()

    def release(self) -> None:
        """Restore the loader's own sampler."""
        self.loader.__dict__[self._attribute] = self._sampler


class _Anew(NotingSampler):
    """A sampler that, at the start of an epoch, forgets what was drawn but not used in the last one."""

    def __iter__(self) -> Iterator[Any]:
        self._drawn.clear()
        yield from super().__iter__()


def resumed(path: Path, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the recorder's options for a training that resumes after this many steps; 0 for a new one."""
    if steps and not (path / MANIFEST).exists():
        warnings.warn(
            f"The training continues from a checkpoint after {steps} steps, and {path} has no run of these: the run "
            "begins there, and scores say what examples did from then on. Record from the beginning for all of it.",
            LeaveoutWarning,
            stacklevel=3,
        )
        return {**options, "resume": False}
    return {**options, "resume": steps, "overwrite": options.get("overwrite", False) and not steps}


def is_given(batch: Any, inputs: Any) -> bool:
    """Say whether what a trainer's step was given is this batch, moved to a device perhaps.

    >>> is_given({"x": torch.zeros(1), "y": torch.ones(1)}, {"x": torch.zeros(1)})
    True
    """
    if isinstance(batch, Mapping) and isinstance(inputs, Mapping):
        pairs = [(batch[name], inputs[name]) for name in batch if name in inputs]
        return bool(pairs) and all(is_given(*pair) for pair in pairs)
    if isinstance(batch, Tensor) and isinstance(inputs, Tensor):
        return batch is inputs or (batch.shape == inputs.shape and torch.equal(batch.to(inputs.device), inputs))
    if isinstance(batch, list | tuple) and isinstance(inputs, list | tuple):
        return len(batch) == len(inputs) and all(map(is_given, batch, inputs))
    return batch is inputs or repr(batch) == repr(inputs)
