"""Where raw files come from: the directory named by LEAVEOUT_DATA, then leaveout's cache, then a download.

Contents are compared with the original's checksum after decompression, so a file may be kept plain, as .gz or as .xz.
Archives are read in memory, member by member, and never unpacked to disk: no name in them can reach a path.
"""

import gzip
import hashlib
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from leaveout._util.files import cache_directory
from leaveout.errors import InputError

_DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)


@dataclass(frozen=True)
class Remote:
    """A public file: `folder` is its place below the data directory, `checksum` that of the download."""

    folder: str
    name: str
    url: str
    checksum: str


def roots() -> list[Path]:
    """Return the directories that are searched, in order."""
    directory = os.environ.get("LEAVEOUT_DATA")
    if directory and not Path(directory).is_dir():
        raise InputError(
            f"LEAVEOUT_DATA names {directory}, which is not a directory; create it or unset the variable.",
            code="data-directory-missing",
        )
    return ([Path(directory)] if directory else []) + [cache_directory()]


def find(folder: str, *patterns: str) -> Path | None:
    """Find the first file that matches one of the patterns, in the order of `roots` and then of the patterns."""
    matches = (path for root in roots() for pattern in patterns for path in sorted((root / folder).glob(pattern)))
    return next((path for path in matches if path.is_file()), None)


def variants(name: str) -> tuple[str, ...]:
    """Return the names under which a file may be kept: plain or compressed."""
    return name, f"{name}.gz", f"{name}.xz"


def download(remote: Remote) -> Path:
    """Fetch a file into the cache; if that fails, say which file to put where."""
    cache = cache_directory() / remote.folder
    import pooch  # needed only if something is fetched

    try:
        return Path(pooch.retrieve(remote.url, remote.checksum, fname=remote.name, path=cache))
    except OSError as error:  # every failure of the network or of the disk
        reason = f"could not be fetched from {remote.url} ({type(error).__name__})"
    except ValueError:  # what pooch raises for a wrong checksum
        reason = f"has a wrong checksum as {remote.url} serves it"
    raise InputError(
        f"{remote.name} was not found and {reason}: put it into {roots()[0] / remote.folder}, "
        f"or set LEAVEOUT_DATA to a directory that has it as {remote.folder}/{remote.name}.",
        code="data-not-found",
    )


def read(path: Path) -> bytes:
    """Read a file, decompressed according to its suffix."""
    try:
        return _DECOMPRESS.get(path.suffix, bytes)(path.read_bytes())
    except _DAMAGED as error:
        raise InputError(
            f"{path} cannot be read ({error}): replace it with the original, or delete it.", code="data-unreadable"
        ) from error


def members(path: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Read the regular files in a tar archive; links and devices are skipped."""
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    yield PurePosixPath(member.name), file.read()
    except _DAMAGED as error:
        raise InputError(
            f"{path} cannot be read ({error}): replace it with the original, or delete it.", code="data-unreadable"
        ) from error


def checked(content: bytes, sha256: str, path: Path) -> bytes:
    """Return the content, if it is the original's."""
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(
            f"{path} differs from the original (sha256): replace it with the original, or delete it.",
            code="data-changed",
        )
    return content


def original(remote: Remote, sha256: str) -> bytes:
    """Return the decompressed content of one public file, found or fetched, and checked."""
    path = find(remote.folder, *variants(remote.name.removesuffix(".gz"))) or download(remote)
    return checked(read(path), sha256, path)
