"""The shards of one computation: done by an engine, and kept as they finish, so that what was killed can go on.

A kept shard is one file named by a hash of everything that it depends on, this library's code and PyTorch's version
included: other work never finds it, nor does the same work after an upgrade, which may round otherwise. It is written
aside and renamed, with a checksum; one that was damaged is done again.
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
    """What a part of the work gave, and what it cost."""

    tensors: dict[str, Tensor]
    cost: Cost


def completed(
    resources: Resources,
    function: Callable[[tuple[T, Path | None]], Shard],
    items: Sequence[T],
    keys: Sequence[str],
    what: str,
) -> Iterator[Shard]:
    """Yield ``function((item, checkpoint))`` of every item, in order; those kept under their keys are read instead.

    Whoever takes them decides how many are held together; only shards that are done before their turn wait here.

    Args:
        resources: the engine, and where shards are kept.
        function: gives an item's shard; may note in a file ``checkpoint`` how far it is.
        items: the parts of the work.
        keys: a word for each item, with everything that its shard depends on.
        what: a word for the progress bar.
    """
    files = _files(resources, keys)
    missing = [place for place in range(len(items)) if not (files and _read(files[place]))]
    checkpoints = [file.with_suffix(".mark") if resources.same_disk else None for file in files] or [None] * len(items)
    todo = [(items[place], checkpoints[place]) for place in missing]
    # In this process, a shard shows a bar of its own, which counts the others in.
    done = resources.map(function, todo, what) if resources.elsewhere else _in_turn(function, todo)

    def kept(place: int) -> Shard:  # read a second time, so that not all of them are held; if it is gone, done again
        return _read(files[place]) or function((items[place], None))

    waiting: dict[int, Shard] = {}
    undone, turn = set(missing), 0
    for number, shard in done:
        place = missing[number]
        if files:
            _write(files[place], shard)
        if checkpoint := checkpoints[place]:
            checkpoint.unlink(missing_ok=True)
        waiting[place] = shard
        while turn in waiting or (turn < len(items) and turn not in undone):
            yield waiting.pop(turn) if turn in waiting else kept(turn)
            turn += 1
    for place in range(turn, len(items)):
        yield kept(place)


def _in_turn(function: Callable[[T], Shard], items: Sequence[T]) -> Iterator[tuple[int, Shard]]:
    for number, item in enumerate(items):
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
    """Return a hash of what computes: this library's source as it is on disk, and PyTorch's version."""
    source = hashlib.sha256(torch.__version__.encode())
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        source.update(f"{file.relative_to(package)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return source.hexdigest()


def cached_work(run_fingerprint: int, *question: object) -> Path:
    """Return the directory in the user's cache where a command keeps the shards of what it was asked about a run.

    Not beside the run: a run may come from a stranger, and shards of his must not be found.
    """
    name = hashlib.sha256(repr(question).encode()).hexdigest()[:16]
    return cache_directory() / "work" / f"{run_fingerprint:08x}" / name


def _write(file: Path, shard: Shard) -> None:
    save_sealed(file, shard.tensors, {"file": file.name, "cost": asdict(shard.cost)})


def _read(file: Path) -> Shard | None:
    try:
        tensors, facts = read_sealed(file)
        # A shard in another's place is not taken for it.
        return Shard(tensors, Cost(**facts["cost"])) if facts["file"] == file.name else None
    except (OSError, KeyError, TypeError, ValueError):
        return None
