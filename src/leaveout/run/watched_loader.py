"""A loader's twin that notes which examples it draws."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from leaveout.errors import InputError, UnsupportedError
from leaveout.task import batches


class Noted:
    """A loader with the numbers of the examples in each of its batches; kept, so that its workers may persist."""

    def __init__(self, loader: DataLoader) -> None:
        _check_loader(loader)
        self.loader = loader
        self.size = batches.size(loader.dataset)
        self._drawn: deque[list[int]] = deque()
        self._twin = copy.copy(loader)
        # DataLoader forbids setting these after construction; the copy has no iterator yet, so it is safe.
        attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._twin.__dict__[attribute] = _NotingSampler(getattr(loader, attribute), self._drawn)
        self._twin.__dict__["_iterator"] = None

    @property
    def length(self) -> int:
        """How many batches there are; 0 where the loader does not know."""
        try:
            return len(self.loader)
        except TypeError:
            return 0

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        self._drawn.clear()
        for batch in self._twin:
            yield torch.tensor(self._drawn.popleft()), batch


class _NotingSampler:
    """A sampler that appends what it draws to a queue; loaders hand batches out in the order they were drawn."""

    def __init__(self, sampler: Any, drawn: deque[list[int]]) -> None:
        self.sampler = sampler
        self.drawn = drawn

    def __iter__(self) -> Iterator[Any]:
        for indices in self.sampler:
            single = not isinstance(indices, Sized) or getattr(indices, "shape", None) == ()
            self.drawn.append(batches.numbers([indices] if single else indices).tolist())
            yield indices

    def __len__(self) -> int:
        return len(self.sampler)


def _check_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise InputError(
            f"watch() takes a torch DataLoader, not a {type(loader).__name__}: use recorder.step(ids) in other loops."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise UnsupportedError(
            "The loader reads an IterableDataset, whose examples have no numbers: use a map-style Dataset, or call "
            "recorder.step(ids) before each optimizer.step()."
        )
    if not getattr(loader, "in_order", True):
        raise UnsupportedError("The loader hands batches out of order: build it with in_order=True.")
