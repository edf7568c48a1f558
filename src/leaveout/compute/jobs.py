"""The shards of one computation: done by an engine, and stored as they finish, so that killed work can be resumed.

A stored shard is one file named by a hash of everything it depends on, including this library's code and PyTorch's
version: other work never finds it, nor does the same work after an upgrade, which may round differently. It is written
to a temporary file and renamed, with a checksum; a damaged one is computed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from leaveout._util.files import cache_directory, read_sealed, save_sealed
from leaveout.compute import progress
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """The result of a part of the work, and its cost."""

    tensors: dict[str, Tensor]
    cost: Cost


def completed(
    resources: Resources,
    function: Callable[[tuple[T, Path | None]], Shard],
    items: Sequence[T],
    keys: Sequence[str],
    what: str,
) -> Iterator[Shard]:
    """Yield ``function((item, checkpoint))`` for every item, in order; those stored under their keys are read instead.

    The caller decides how many are held at once; only shards that are done before their turn wait here.

    Args:
        resources: the engine, and where shards are stored.
        function: returns an item's shard; may save its progress in the file ``checkpoint``.
        items: the parts of the work.
        keys: a string for each item, with everything that its shard depends on.
        what: a word for the progress bar.
    """
    shelf = Shelf(resources, keys)
    stored = {place for place in range(len(items)) if shelf.find(place)}
    missing = [place for place in range(len(items)) if place not in stored]
    todo = [(items[place], shelf.checkpoint(place)) for place in missing]
    # In this process, a shard shows its own progress bar, which includes the others.
    done = resources.map(function, todo, what) if resources.elsewhere else _in_turn(function, resources, todo)

    def reread(place: int) -> Shard:  # so that not all are in memory; a shard that is gone is computed again
        return shelf.find(place) or function((items[place], None))

    waiting: dict[int, Shard] = {}
    turn = 0
    for number, shard in done:
        place = missing[number]
        shelf.keep(place, shard)
        waiting[place] = shard
        while turn in waiting or turn in stored:
            yield waiting.pop(turn) if turn in waiting else reread(turn)
            turn += 1
    yield from map(reread, range(turn, len(items)))


class Shelf:
    """Where the shards of one computation are stored; nowhere without a place for work.

    Args:
        resources: says where.
        keys: a string for each shard, with everything that it depends on.
    """

    def __init__(self, resources: Resources, keys: Sequence[str]) -> None:
        self._files = _files(resources, keys)
        self._marks = bool(self._files) and resources.same_disk

    def find(self, place: int) -> Shard | None:
        """Return a stored shard; None if it has to be computed."""
        return _read(self._files[place]) if self._files else None

    def checkpoint(self, place: int) -> Path | None:
        """Return the file in which the work on a shard saves its progress, if it does."""
        return self._files[place].with_suffix(".mark") if self._marks else None

    def keep(self, place: int, shard: Shard) -> None:
        """Store a shard."""
        if self._files:
            _write(self._files[place], shard)
        if checkpoint := self.checkpoint(place):
            checkpoint.unlink(missing_ok=True)


def _in_turn(function: Callable[[T], Shard], resources: Resources, items: Sequence[T]) -> Iterator[tuple[int, Shard]]:
    for number, item in enumerate(resources.watch(items, len(items))):
        with progress.part(number, len(items)):
            shard = function(item)
        yield number, shard


def _files(resources: Resources, keys: Sequence[str]) -> list[Path]:
    if resources.work is None:
        return []
    folder = Path(resources.work).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"work={str(folder)!r} is not a place for shards ({error}): give a directory.", code="work-not-a-directory"
        ) from None
    names = (hashlib.sha256(f"{code_version()} {key}".encode()).hexdigest()[:32] for key in keys)
    return [folder / f"{name}.safetensors" for name in names]


@cache
def code_version() -> str:
    """Return a hash of the code that computes: this library's source on disk, and PyTorch's version."""
    source = hashlib.sha256(torch.__version__.encode())
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        source.update(f"{file.relative_to(package)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return source.hexdigest()


def cached_work(run_fingerprint: int, *question: object) -> Path:
    """Return the directory in the user's cache where a command stores the shards of its work on a run.

    It is not beside the run: a run may come from an untrusted source, whose shards must not be used.
    """
    name = hashlib.sha256(repr(question).encode()).hexdigest()[:16]
    return cache_directory() / "work" / f"{run_fingerprint:08x}" / name


def _write(file: Path, shard: Shard) -> None:
    save_sealed(file, shard.tensors, {"file": file.name, "cost": asdict(shard.cost)})


def _read(file: Path) -> Shard | None:
    try:
        tensors, facts = read_sealed(file)
        # A shard under another's name is not accepted.
        return Shard(tensors, Cost(**facts["cost"])) if facts["file"] == file.name else None
    except (OSError, KeyError, TypeError, ValueError):
        return None
