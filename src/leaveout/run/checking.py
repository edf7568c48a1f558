"""Checks that the files of a run directory are as they were written."""

from __future__ import annotations

from pathlib import Path

from leaveout._util.lock import has_writer
from leaveout.errors import RunError
from leaveout.run.manifest import read_manifest
from leaveout.run.reader import Run
from leaveout.run.remote import local


def check_run(path: str | Path) -> list[str]:
    """Read every byte of a run directory and list its problems, one sentence each; the list is empty if there are none.

    A run that was cut short is not a problem; files that no recorder wrote are named. A run that is being recorded is
    not a problem either: its newest shard exists a moment before the manifest names it.
    """
    path = local(path)
    try:
        run = Run(path, read_manifest(path))
        damage, strangers = run.damage(), _strangers(run)
        if strangers:
            # If there is no writer now, the manifest names everything that was written.
            strangers = [] if has_writer(path) else _strangers(Run(path, read_manifest(path)))
    except RunError as error:
        return [str(error)]
    return [
        *damage,
        *(f"{path / name} belongs to no recorded step: delete it, or continue the run." for name in strangers),
    ]


def _strangers(run: Run) -> list[str]:
    listed = {shard.name for shard in run.manifest.shards}
    return sorted(file.name for file in run.path.glob("shard-*") if file.name not in listed)
