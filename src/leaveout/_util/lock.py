"""Locks that allow a directory one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import warnings
import weakref
from pathlib import Path

from leaveout.errors import LeaveoutWarning, RunError

LOCK = ".lock"

BUSY = (errno.EWOULDBLOCK, errno.EACCES)
"""What a system says of a file that another writer has locked."""

WITHOUT_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)
"""What a file system says that has no locks, such as some that are mounted over a network."""


class Lock:
    """A lock that allows a directory one writer; the system releases it when the process ends, however it ends.

    On a file system without locks there is a warning, and nothing that keeps a second writer out.

    Raises:
        RunError: if there is another writer, in this process or another.
        OSError: if this directory cannot hold a lock.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / LOCK
        self._descriptor = _locked(self._file)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        _HELD.add(self)

    def release(self) -> None:
        """Let another writer in."""
        if self._close.alive:
            self._file.unlink(missing_ok=True)  # before the release: afterwards it could be another writer's
            self._close()

    def forget(self) -> None:
        """Close the lock silently in a child process: it belongs to the parent."""
        self._close()


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_HELD):
        lock.forget()


# A forked child, such as a loader's worker, would keep holding the lock after its parent has died.
os.register_at_fork(after_in_child=_forget_all)


def _locked(file: Path) -> int:
    """Lock a file that holds the number of its process, and create it if it is missing; return its descriptor."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            _take(file, descriptor)
            if _is_still(file, descriptor):
                _sign(file, descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _take(file: Path, descriptor: int) -> None:
    """Lock an opened file, or refuse if another process has locked it."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # another file under a second name
        raise OSError(f"{file} is not a lock file")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            warnings.warn(
                f"{file.parent} is on a file system without locks ({error.strerror}): make sure that nothing else "
                "writes there meanwhile.",
                LeaveoutWarning,
                stacklevel=2,
            )
            return
        if error.errno not in BUSY:
            raise
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        writer = f"process {holder}" if holder else "another process"
        raise RunError(
            f"{file.parent} is being written by {writer}: wait until it has ended, "
            "call finish() on its recorder, or choose another directory.",
            code="directory-busy",
        ) from None


def _sign(file: Path, descriptor: int) -> None:
    """Write this process's number into its lock file."""
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    except OSError:  # the disk is full
        file.unlink(missing_ok=True)
        raise


def has_writer(folder: Path) -> bool:
    """Say whether a directory has a writer."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in BUSY
    finally:
        os.close(descriptor)
    return False


def _is_still(file: Path, descriptor: int) -> bool:
    """Say whether the opened lock file is still in place: its last writer may have removed it before we locked it."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.lstat())
    except FileNotFoundError:
        return False
