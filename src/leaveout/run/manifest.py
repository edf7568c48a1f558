"""The description of a run directory: what was trained and how, its shards, the checksums of all its files."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from leaveout._util.files import checksum, plain, unsealed, write_json
from leaveout.errors import RunError
from leaveout.optim import Rule
from leaveout.run.paths import CONFIG

FORMAT = 4
READABLE = (2, 3, 4)
"""Format 2 has no modes, buffers or micro-batches; format 3 stores all states whole."""
MANIFEST = "manifest.json"
INITIAL = "initial.safetensors"
AGAIN = "the run is damaged; restore it or record it again."
MOST_BYTES = 100_000_000
"""The largest manifest that is read: enough for a million shards, or as many parameters."""


@dataclass(frozen=True)
class Shard:
    """A shard's entry in the manifest: number, steps, and checksums of its file and of its list of states."""

    number: int
    steps: int
    crc32: int
    kept_crc32: int

    @property
    def name(self) -> str:
        """The file name, built from the number: a name in a manifest is never trusted."""
        return shard_name(self.number)


@dataclass(frozen=True)
class Manifest:
    """The description of a run directory."""

    rule: Rule
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    constants: dict[str, int]
    train_size: int | None
    initial_crc32: int = 0
    shards: tuple[Shard, ...] = ()
    finished: bool = False
    format: int = FORMAT
    # Of the config beside the run, if there was one; not part of what identifies a run.
    config_crc32: int | None = field(default=None, repr=False)
    # Which modules were in training mode, one list per combination that occurred (shards say which one each step had);
    # buffers that training changed, with their shapes.
    modes: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    buffers: dict[str, list[int]] = field(default_factory=dict, repr=False)
    # The structure of a batch, if batches are kept with the run.
    structure: Any = field(default=None, repr=False)
    # The dtype of autocast in forward passes, if it was used.
    autocast: str | None = field(default=None, repr=False)
    # Which of those buffers are part of the average of the weights, if there is one.
    averaged: dict[str, list[int]] = field(default_factory=dict, repr=False)
    # Whether some step did not move all parameters alike.
    uneven: bool = field(default=False, repr=False)
    # What was seen of the loop besides its steps, by the names in ``seen.py``.
    seen: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def steps(self) -> int:
        """The number of steps on disk."""
        return sum(shard.steps for shard in self.shards)


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.safetensors"


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest, replacing an old one atomically."""
    written = asdict(manifest)
    for name in ("clip", "assigned", *([] if manifest.rule.extras else ["extras"])):  # most runs have no extras
        del written["rule"][name]
    if not manifest.seen:
        del written["seen"]
    write_json(path / MANIFEST, written)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a run directory and compare it with its checksum."""
    file = path / MANIFEST
    try:
        if not file.exists():
            raise RunError(
                f"{path} does not hold a run (no {MANIFEST}): give the directory that a Recorder wrote.",
                code="run-not-found",
            )
        if plain(file).stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        raw = json.loads(file.read_text(encoding="utf-8"))
        if raw["format"] not in READABLE:
            raise RunError(
                f"{path} is in format {raw['format']}, this version reads {FORMAT} and before: use the version "
                "that wrote it, or record the run again.",
                code="format-not-supported",
            )
        numbers = [shard["number"] for shard in raw["shards"]]
        if any(before >= after for before, after in pairwise(numbers)):
            raise ValueError("a shard that is named twice, or out of its order")
        return _manifest(unsealed(raw))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{file} is not a manifest of a run ({error!r}): {AGAIN}", code="manifest-unreadable") from None


def cut_short(path: Path) -> bool:
    """Say whether a directory holds a run that is not finished."""
    return (path / MANIFEST).exists() and not read_manifest(path).finished


def _manifest(raw: dict[str, Any]) -> Manifest:
    """Build the manifest, checking the type of every part: it may come from an untrusted source."""
    rule = raw["rule"]
    manifest = Manifest(
        **{
            **raw,
            "rule": Rule(rule["kind"], dict(rule["groups"]), tuple(rule["slots"]), tuple(rule.get("extras", ()))),
            "shards": tuple(Shard(**shard) for shard in raw["shards"]),
            "modes": tuple(tuple(names) for names in raw.get("modes", ())),
        }
    )
    _check_names(manifest)
    _check_counts(manifest)
    if manifest.autocast not in (None, "bfloat16", "float16"):
        raise ValueError(f"autocast is {manifest.autocast!r}")
    for name in ("finished", "uneven"):
        if type(getattr(manifest, name)) is not bool:
            raise ValueError(f"{name} is {getattr(manifest, name)!r}")
    return manifest


def _check_names(manifest: Manifest) -> None:
    groups = manifest.rule.groups
    if not groups or not set(groups) == set(manifest.shapes) == set(manifest.dtypes):
        raise ValueError("groups, shapes and dtypes name different parameters")
    if not set(manifest.averaged) <= set(manifest.buffers):
        raise ValueError("averages of buffers that do not move")
    if not all(isinstance(name, str) for names in manifest.modes for name in names):
        raise ValueError("a module's name that is not a string")
    if not all(isinstance(word, str) for pair in manifest.seen.items() for word in pair):
        raise ValueError("a fact about the loop that is not a string")
    if not all(isinstance(dtype, str) for dtype in manifest.dtypes.values()):
        raise ValueError("a type's name that is not a string")


def _check_counts(manifest: Manifest) -> None:
    counts = [*manifest.rule.groups.values(), *manifest.constants.values(), manifest.initial_crc32]
    counts += [count for count in (manifest.train_size, manifest.config_crc32) if count is not None]
    parts = (*map(astuple, manifest.shards), *manifest.shapes.values(), *manifest.buffers.values())
    counts += [number for part in parts for number in part]
    if any(type(count) is not int or count < 0 for count in counts) or any(part.steps < 1 for part in manifest.shards):
        raise ValueError("a count that is not a whole number, or negative")
    if max(*counts, manifest.steps) >= 2**63:
        raise ValueError("a count beyond all bounds")


def check_config(path: Path) -> None:
    """Refuse a config that is not the one the run was made with; runs without a config are accepted."""
    file, expected = path / CONFIG, read_manifest(path).config_crc32
    try:
        if expected is not None and file.exists() and checksum(plain(file)) != expected:
            raise RunError(
                f"{file} was changed since the run was made with it: restore it, or train again with it into another "
                "directory.",
                code="config-changed",
            )
    except OSError as error:
        raise RunError(f"{file} cannot be read ({error}): restore it.", code="config-unreadable") from None
