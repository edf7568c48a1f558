"""Loaders that record which examples they draw."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from leaveout.errors import InputError, UnsupportedError, kind_of
from leaveout.run import kept_batches
from leaveout.task import batches

INNER = "base_dataloader"
"""The attribute in which accelerate's loaders hold the loader that they draw from."""


class Watched:
    """A loader whose batches are recorded: each iteration over it is an epoch; other attributes are the loader's."""

    def __init__(self, indexed: IndexedLoader, epoch: Callable[[IndexedLoader], Iterator[Any]]) -> None:
        self._indexed, self._epoch = indexed, epoch

    def __iter__(self) -> Iterator[Any]:
        return self._epoch(self._indexed)

    def __len__(self) -> int:
        return len(self._indexed.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._indexed.loader, name)


def unwatched(loader: Any) -> Any:
    """Return the original loader, even if it is already being watched."""
    return loader._indexed.loader if isinstance(loader, Watched) else loader


class IndexedLoader:
    """A loader with the ids of the examples in each of its batches; kept between epochs so that workers may persist.

    The batches come from a copy of the loader whose sampler records what it draws. An adapter, such as accelerate's,
    draws from an inner loader: then that one is copied, and the copy replaces it while the adapter is iterated over.
    """

    def __init__(self, loader: DataLoader) -> None:
        check_loader(loader)
        self.loader = loader
        self.size = batches.size(loader.dataset)
        self._drawn: deque[list[int]] = deque()
        inner = getattr(loader, INNER, None)
        drawing = inner if isinstance(inner, DataLoader) else loader
        self._adapted = drawing is not loader
        self._twin = copy.copy(drawing)
        # DataLoader forbids setting these after construction; the copy has no iterator yet, so it is safe.
        attribute = "sampler" if drawing.batch_sampler is None else "batch_sampler"
        self._twin.__dict__[attribute] = NotingSampler(getattr(drawing, attribute), self._drawn)
        self._twin.__dict__["_iterator"] = None

    def gives_something_else(self, ids: Tensor, batch: Any) -> bool:
        """Say whether its data set gives a different batch for the same ids."""
        return kept_batches.gives_something_else(self.loader.dataset, ids, batch, self.loader.collate_fn)

    @property
    def length(self) -> int:
        """The number of batches; 0 if the loader does not know it."""
        try:
            return len(self.loader)
        except TypeError:
            return 0

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        self._drawn.clear()
        with self._noting() as loader:
            for batch in loader:
                if not self._drawn:
                    raise UnsupportedError(
                        f"The batches of this {type(loader).__name__} do not come from its own sampler, so their "
                        "examples are not known: iterate over it yourself and call recorder.step(ids) before each "
                        "optimizer.step().",
                        code="loader-ids-unknown",
                    )
                # By way of numpy, which reads a list several times as fast.
                yield torch.from_numpy(np.array(self._drawn.popleft(), dtype=np.int64)), batch

    @contextmanager
    def _noting(self) -> Iterator[DataLoader]:
        if not self._adapted:
            yield self._twin
            return
        inner = getattr(self.loader, INNER)
        setattr(self.loader, INNER, self._twin)
        try:
            yield self.loader
        finally:
            setattr(self.loader, INNER, inner)


class IndexedLoaders:
    """The loaders of one training, each indexed once; all of them read the same data set."""

    def __init__(self) -> None:
        self._known: dict[int, IndexedLoader] = {}
        self.size: int | None = None

    def of(self, loader: DataLoader) -> IndexedLoader:
        """Return the indexed version of a loader."""
        if id(loader) not in self._known:
            indexed = IndexedLoader(loader)
            if self.size not in (None, indexed.size):
                raise UnsupportedError(
                    f"This loader reads another data set ({indexed.size} examples, not {self.size}), so the numbers of "
                    "examples would be mixed up: put both into one ConcatDataset.",
                    code="loaders-differ",
                )
            self._known[id(loader)], self.size = indexed, indexed.size
        return self._known[id(loader)]

    def release(self) -> None:
        """Drop the loaders: persistent workers then end now, not when a reference cycle is collected."""
        self._known.clear()


class NotingSampler:
    """A sampler that appends what it draws to a queue; loaders yield batches in the order they were drawn.

    All other attributes are those of the wrapped sampler: accelerate sets the epoch through it.
    """

    def __init__(self, sampler: Any, drawn: deque[list[int]]) -> None:
        self._indexed = sampler
        self._drawn = drawn

    def __iter__(self) -> Iterator[Any]:
        for indices in self._indexed:
            if type(indices) is list and set(map(type, indices)) == {int} and min(indices) >= 0:
                drawn = list(indices)  # as most samplers yield them
            else:
                single = not isinstance(indices, Sized) or getattr(indices, "shape", None) == ()
                drawn = batches.numbers([indices] if single else indices).tolist()
            self._drawn.append(drawn)
            yield indices

    def __len__(self) -> int:
        return len(self._indexed)

    def __getattr__(self, name: str) -> Any:
        if name in ("_indexed", "_drawn"):
            raise AttributeError(name)
        return getattr(self._indexed, name)


def check_loader(loader: Any) -> None:
    """Refuse a loader whose examples have no ids, or whose batches come out of order."""
    if not isinstance(loader, DataLoader):
        raise InputError(
            f"watch() takes a torch DataLoader, not {kind_of(loader)}: use recorder.step(ids) in other loops.",
            code="loader-expected",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise UnsupportedError(
            "The loader reads an IterableDataset, whose examples have no numbers: use a map-style Dataset, or call "
            "recorder.step(ids) before each optimizer.step().",
            code="examples-without-numbers",
        )
    if not getattr(loader, "in_order", True):
        raise UnsupportedError(
            "The loader hands batches out of order: build it with in_order=True.", code="loader-out-of-order"
        )
