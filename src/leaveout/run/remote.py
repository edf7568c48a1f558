"""Run directories on remote storage: fetched once into the local cache, then read like any other."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from leaveout._util.files import SURROGATE, cache_directory, checksum, write_whole
from leaveout.errors import InputError, RunError, first_line

MANIFEST = "manifest.json"
FILES = re.compile(r"initial\.safetensors|shard-(\d+)\.safetensors")
"""The files of a run directory; others are not fetched."""

INITIAL = -1
"""The number that stands for the initial state, which precedes the shards."""

_SOURCES: dict[Path, str] = {}


def local(path: str | Path) -> Path:
    """Return the directory itself, or for an address like ``s3://bucket/run`` a local copy of that run.

    A copy belongs to one manifest: a run that has changed is fetched again. Local files whose checksum agrees with
    the manifest are not fetched again.
    """
    if SURROGATE.search(str(path)):
        raise InputError(
            f"{path} is not valid UTF-8, and files are read by such names alone: rename it.",
            code="address-not-reachable",
        )
    if "://" not in str(path):
        return Path(path)
    import fsspec  # takes long, and most runs are on this machine

    try:
        system, root = fsspec.core.url_to_fs(str(path))
    except Exception as error:  # noqa: BLE001 - each file system has errors of its own for what it misses
        raise InputError(
            f"{path} cannot be reached ({first_line(error)}): correct it, or install what it needs.",
            code="address-not-reachable",
        ) from None
    if "file" in system.protocol:
        return Path(root)
    try:
        return _fetched(system, root, str(path))
    except FileNotFoundError:
        raise RunError(
            f"{path} does not hold a run (no {MANIFEST}): give the directory that a Recorder wrote.",
            code="run-not-found",
        ) from None
    except Exception as error:  # noqa: BLE001 - and for what it is refused
        raise RunError(
            f"{path} cannot be read ({first_line(error)}): try again, or copy the run here.", code="run-not-fetched"
        ) from None


def source(path: Path) -> str:
    """Return where another process finds the run of this directory."""
    return _SOURCES.get(path) or str(path.resolve())


def _fetched(system: Any, root: str, address: str) -> Path:
    manifest = system.cat_file(f"{root}/{MANIFEST}")
    name = hashlib.sha256(address.encode() + b"\0" + manifest).hexdigest()[:32]
    folder = cache_directory() / "runs" / name
    folder.mkdir(parents=True, exist_ok=True)
    sums = _checksums(manifest)
    for entry in system.ls(root, detail=True):
        file = Path(entry["name"]).name
        if match := FILES.fullmatch(file):
            _fetch(system, entry, folder / file, sums.get(int(match[1] or INITIAL)))
    write_whole(folder / MANIFEST, lambda aside: aside.write_bytes(manifest))
    _SOURCES[folder] = address
    return folder


def _checksums(manifest: bytes) -> dict[int, Any]:
    """Return the checksums of a run's files by number; none for an invalid manifest, which its reader will refuse."""
    try:
        content = json.loads(manifest)
        return {
            INITIAL: content["initial_crc32"],
            **{int(shard["number"]): shard["crc32"] for shard in content["shards"]},
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _fetch(system: Any, entry: dict[str, Any], file: Path, crc32: Any) -> None:
    if file.exists() and file.stat().st_size == entry["size"] and crc32 in (None, checksum(file)):
        return

    def get(aside: Path) -> None:
        system.get_file(entry["name"], str(aside))
        if aside.stat().st_size != entry["size"]:
            raise OSError(f"{entry['name']} came with {aside.stat().st_size} of {entry['size']} bytes")

    write_whole(file, get)
