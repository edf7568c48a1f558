"""Deletes a run that is to be recorded again, with everything computed from it, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from leaveout._util.leftovers import remove_asides, tidy_folder
from leaveout._util.lock import Lock
from leaveout.run.manifest import INITIAL, MANIFEST, read_manifest
from leaveout.run.paths import RunPaths


def clear(path: str | Path) -> None:
    """Delete the run in a directory, if there is one: its files, scores, checks, labels, curve, report and config.

    The manifest is deleted last, so that an interrupted call can be repeated. Other files stay, and the directory is
    then refused because it is not empty.
    """
    path = Path(path)
    if not (path / MANIFEST).exists():
        return
    lock = Lock(path)  # refuses while another process is writing
    try:
        for folder in ("", "scores", "checks"):
            tidy_folder(path / folder)
        paths, shards = RunPaths(path), [path / shard.name for shard in read_manifest(path).shards]
        results = [*paths.scored(), *paths.checked(), paths.labels, paths.cleanse, paths.report]
        results += [paths.training, paths.config]
        for file in results:
            remove_asides(file)
        for file in [*results, *shards, path / INITIAL, path / MANIFEST]:
            file.unlink(missing_ok=True)
        for folder in ("scores", "checks"):
            with suppress(OSError):  # missing, or not empty
                (path / folder).rmdir()
    finally:
        lock.release()
