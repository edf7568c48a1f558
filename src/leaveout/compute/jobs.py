"""The shards of one computation: done by an engine, and kept as they finish, so that what was killed can go on.

A kept shard is one file named by a hash of everything that it depends on: other work never finds it. It is written
aside and renamed, with a checksum; one that was damaged is done again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import pooch
from torch import Tensor

from leaveout._util.files import read_sealed, save_sealed
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
) -> list[Shard]:
    """Call ``function((item, checkpoint))`` for every item; those that are kept under their keys are read instead.

    Args:
        resources: the engine, and where shards are kept.
        function: gives an item's shard; may note in a file ``checkpoint`` how far it is.
        items: the parts of the work.
        keys: a word for each item, with everything that its shard depends on.
        what: a word for the progress bar.
    """
    files = _files(resources, keys)
    shards = {place: shard for place, file in enumerate(files) if (shard := _read(file)) is not None}
    missing = [place for place in range(len(items)) if place not in shards]
    checkpoints = [file.with_suffix(".mark") if resources.same_disk else None for file in files] or [None] * len(items)
    todo = [(items[place], checkpoints[place]) for place in missing]
    # In this process, a shard shows a bar of its own, which counts the others in.
    results = resources.map(function, todo, what) if resources.elsewhere else _in_turn(function, todo)
    for number, shard in results:
        place = missing[number]
        shards[place] = shard
        if files:
            _write(files[place], shard)
        if checkpoint := checkpoints[place]:
            checkpoint.unlink(missing_ok=True)
    return [shards[place] for place in range(len(items))]


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
    return [folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors" for key in keys]


def cached_work(run_fingerprint: int, *question: object) -> Path:
    """Return the directory in the user's cache where a command keeps the shards of what it was asked about a run.

    Not beside the run: a run may come from a stranger, and shards of his must not be found.
    """
    name = hashlib.sha256(repr(question).encode()).hexdigest()[:16]
    return Path(pooch.os_cache("leaveout")) / "work" / f"{run_fingerprint:08x}" / name


def _write(file: Path, shard: Shard) -> None:
    save_sealed(file, shard.tensors, {"file": file.name, "cost": asdict(shard.cost)})


def _read(file: Path) -> Shard | None:
    try:
        tensors, facts = read_sealed(file)
        # A shard in another's place is not taken for it.
        return Shard(tensors, Cost(**facts["cost"])) if facts["file"] == file.name else None
    except (OSError, KeyError, TypeError, ValueError):
        return None
