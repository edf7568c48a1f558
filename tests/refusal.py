"""What is refused is told by its exception, its code and what it names; few tests hold the wording itself."""

import gc
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import pytest

import leaveout as lo
from leaveout.run.recording.writer import LOCK, Writer


def settle(path: Path) -> None:
    """Wait for recorders that write there in threads: what these write meanwhile is not the refusal's doing."""
    if any(path.rglob(LOCK)):
        writers = [one for one in gc.get_objects() if isinstance(one, Writer) and one._writing is not None]
        wait([one._writing for one in writers])


def contents(path: Path) -> dict[str, bytes | None]:
    """Every file below a directory, and every directory as None."""
    return {str(file): file.read_bytes() if file.is_file() else None for file in sorted(path.rglob("*"))}


@contextmanager
def refused(
    kind: type[lo.LeaveoutError], code: str, *named: str, unchanged: Path | None = None
) -> Iterator[pytest.ExceptionInfo[lo.LeaveoutError]]:
    """The block raises exactly this exception with this code, names all these, and leaves the directory as it was.

    Where a code covers several causes, what is named is the words for the cause.
    """
    if unchanged:
        settle(unchanged)
    before = contents(unchanged) if unchanged else {}
    with pytest.raises(lo.LeaveoutError) as caught:
        yield caught
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {caught.value}"
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    missing = [word for word in named if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    if unchanged:
        assert contents(unchanged) == before, "the refusal wrote something"
