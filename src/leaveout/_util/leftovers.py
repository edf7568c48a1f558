"""What a killed writer leaves beside a file: its lock, and a version that was never given the file's name."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from leaveout._util.files import asides
from leaveout._util.lock import LOCK, Lock
from leaveout.errors import RunError

LOCKED = re.compile(r"\.(.+)\.lock")


def place_of_lock(file: Path) -> Path:
    """Return the directory whose lock lets one writer at a time write this file."""
    return file.with_name(f".{file.name}.lock")


def tidy(files: Iterable[Path]) -> None:
    """Remove what killed writers of these files left, except where another writer is at work by now."""
    for file in files:
        place = place_of_lock(file)
        if place.is_dir():
            with suppress(RunError, OSError):  # it has a writer, or is not ours to change
                lock = Lock(place)
                remove_asides(file)
                lock.release()
                place.rmdir()


def unlock(folder: Path) -> None:
    """Remove the lock of a killed writer of this directory, unless it has another writer by now."""
    if (folder / LOCK).exists():
        with suppress(RunError, OSError):
            Lock(folder).release()


def tidy_folder(folder: Path) -> None:
    """Remove what killed writers left beside any file of this directory."""
    if folder.is_dir() and not folder.is_symlink():
        locks = [LOCKED.fullmatch(place.name) for place in folder.iterdir()]
        tidy([folder / lock[1] for lock in locks if lock])


def remove_asides(file: Path) -> None:
    """Remove versions of a file that were never given its name; only its one writer may do so."""
    pattern = re.compile(asides(re.escape(file.name)))
    for aside in list(file.parent.iterdir()):
        if pattern.fullmatch(aside.name):
            shutil.rmtree(aside) if aside.is_dir() and not aside.is_symlink() else aside.unlink(missing_ok=True)
