"""Reads query examples: the same each time, even if their data set or collator draws at random.

A collator that masks words draws anew with every call. A question that is asked twice, or of two methods, must be about
the same queries. So those that are drawn are drawn in blocks, each from a seed of its own, and the blocks are kept.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from leaveout._util.generators import random_state, undisturbed
from leaveout.task import batches
from leaveout.task.batches import Batch, Collate

SEED = 0
"""Block b of the queries is drawn with this seed plus b in the generators of PyTorch, numpy and Python, and in those
that data set and collator have of their own."""

BLOCK = 64
"""How many queries are drawn together."""

TRIAL = 16
"""How many queries are read to see whether they are drawn."""

KNOWN = 16
"""How many query sets are kept of those that were asked for last."""

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
FEW = 32
"""How many elements a container may have to be searched for random generators."""

KEPT_BYTES = 1 << 30
"""How much of what was drawn is kept; the rest is drawn again, from the same seeds."""


class Queries:
    """The query sets of a task, by identity, each with the blocks that were drawn of it."""

    def __init__(self, collate: Collate | None) -> None:
        self._collate = collate
        self._known: deque[tuple[Dataset, Drawn | None]] = deque(maxlen=KNOWN)

    def read(self, dataset: Dataset, ids: Sequence[int]) -> Batch:
        """Read the query examples with these ids as one batch."""
        drawn = self._drawn(dataset)
        return batches.read(dataset, ids, self._collate) if drawn is None else drawn.read(ids)

    def chunks(self, dataset: Dataset, ids: range, size: int) -> Iterator[range]:
        """Yield the ids, at most ``size`` at a time, and together only if they are read together."""
        drawn = self._drawn(dataset) is not None
        while len(ids):
            end = min(size, BLOCK - ids[0] % BLOCK) if drawn else size
            yield ids[:end]
            ids = ids[end:]

    def _drawn(self, dataset: Dataset) -> Drawn | None:
        for known, drawn in self._known:
            if known is dataset:
                return drawn
        self._known.append((dataset, Drawn(dataset, self._collate) if _is_drawn(dataset, self._collate) else None))
        return self._known[-1][1]


class Drawn:
    """The queries of a data set that are drawn at random, block by block."""

    def __init__(self, dataset: Dataset, collate: Collate | None) -> None:
        self._dataset, self._collate = dataset, collate
        self._blocks: dict[int, Batch] = {}
        self._bytes = 0

    def read(self, ids: Sequence[int]) -> Batch:
        """Return these queries as one batch; those of several blocks whose shapes differ are drawn together instead."""
        numbers = {number // BLOCK for number in ids}
        if len(numbers) == 1:
            return _rows(self._block(numbers.pop()), [number % BLOCK for number in ids])
        ones = [batches.leaves(_rows(self._block(number // BLOCK), [number % BLOCK])) for number in ids]
        if len({tuple(leaf.shape for leaf in one) for one in ones}) > 1:
            return self._draw(ids, SEED)
        joined = iter([torch.cat(parts) for parts in zip(*ones, strict=True)])
        return batches.map_leaves(lambda _: next(joined), self._block(ids[0] // BLOCK))

    def _block(self, number: int) -> Batch:
        if number in self._blocks:
            return self._blocks[number]
        first = number * BLOCK
        block = self._draw(range(first, min(first + BLOCK, batches.size(self._dataset))), SEED + number)
        self._bytes += sum(leaf.nbytes for leaf in batches.leaves(block) if isinstance(leaf, Tensor))
        if self._bytes <= KEPT_BYTES:
            self._blocks[number] = block
        return block

    def _draw(self, ids: Sequence[int], seed: int) -> Batch:
        with _seeded(seed, self._dataset, self._collate):
            return batches.read(self._dataset, ids, self._collate)


@contextmanager
def restored(*owners: Any) -> Iterator[list[Any]]:
    """Leave random generators as they were before this context: the global ones, and those that these objects hold."""
    own = [generator for owner in owners for generator in _generators_of(owner)]
    states = [_state(generator) for generator in own]
    with undisturbed():
        try:
            yield own
        finally:
            for generator, state in zip(own, states, strict=True):
                _set_state(generator, state)


@contextmanager
def _seeded(seed: int, *owners: Any) -> Iterator[None]:
    with restored(*owners) as own:
        for generator in (torch.default_generator, np.random.mtrand._rand, random, *own):
            _seed(generator, seed)
        yield


def _is_drawn(dataset: Dataset, collate: Collate | None) -> bool:
    """Return whether reading examples advances a random generator, or gives something else the next time."""
    if collate is None and type(dataset) is TensorDataset:
        return False
    ids = range(min(TRIAL, batches.size(dataset)))
    with _seeded(SEED, dataset, collate):
        before = _global_states()
        try:
            first = batches.read(dataset, ids, collate)
            moved = before != _global_states()
            return moved or batches.fingerprint(first) != batches.fingerprint(batches.read(dataset, ids, collate))
        except Exception:  # noqa: BLE001 - data that cannot be read are refused where they are used
            return False


def _global_states() -> Any:
    numbers: Any = np.random.get_state()
    return random_state()["cpu"].tolist(), numbers[1].tobytes(), numbers[2:], random.getstate()


def _generators_of(owner: Any, depth: int = 4) -> list[Any]:
    """Return the random generators that an object holds, in its attributes, arguments or closure."""
    if isinstance(owner, KINDS):
        return [owner]
    if depth == 0 or isinstance(owner, nn.Module | Tensor | type | ModuleType):
        return []
    parts: list[Any] = [getattr(owner, "__self__", None), *getattr(owner, "__dict__", {}).values()]
    parts += [cell.cell_contents for cell in getattr(owner, "__closure__", None) or ()]
    if isinstance(owner, partial):
        parts += [owner.func, *owner.args, *owner.keywords.values()]
    if isinstance(owner, dict | list | tuple) and len(owner) <= FEW:
        parts += owner.values() if isinstance(owner, dict) else owner
    return [generator for part in parts for generator in _generators_of(part, depth - 1)]


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)


def _rows(block: Batch, rows: list[int]) -> Batch:
    return batches.map_leaves(lambda leaf: leaf[rows], block)
