"""Files that are written atomically (whole or not at all), and that detect changes to their content."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from leaveout._util.tensor_bytes import tensor_bytes
from leaveout.errors import InputError, RunError

if TYPE_CHECKING:
    import pandas as pd

BLOCK = 1 << 20

SURROGATE = re.compile("[\ud800-\udfff]")
"""What a text may hold in Python and not in UTF-8: half a character, or a byte of a file's name that is not text."""

FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")
"""How a text begins that a spreadsheet may take for a formula; the page's own export (``dom.js``) has the same."""


def cache_directory() -> Path:
    """Return the path of this user's cache, which need not exist yet."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "leaveout/leaveout/Cache"
    caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / caches) / "leaveout"


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically."""
    write_opened(file, lambda opened: opened.write(text.encode("utf-8", "replace")))  # lone surrogates


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically, with a checksum of its content."""
    write_text(file, json.dumps({"crc32": _json_checksum(content), **content}, indent=1, allow_nan=False))


def read_json(file: Path) -> dict[str, Any]:
    """Read what ``write_json`` wrote.

    Raises:
        ValueError: if its content has changed since.
    """
    try:
        return unsealed(json.loads(plain(file).read_text(encoding="utf-8")))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def plain(file: Path) -> Path:
    """Return the file if it is a regular one: opening a pipe would block forever."""
    if file.exists() and not file.is_file():
        raise OSError(f"{file.name} is not a plain file")
    return file


def unsealed(content: Any) -> dict[str, Any]:
    """Return the content of a JSON object without its checksum, which must be right."""
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    content = dict(content)
    if content.pop("crc32", None) != _json_checksum(content):
        raise ValueError("its checksum is not that of what it says")
    return content


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""

    def save(aside: Path) -> None:
        aside.touch()
        usual = aside.stat().st_mode
        try:
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, aside, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from None  # the library also raises this if the disk is full
        aside.chmod(usual)  # the library's mode is for the owner alone, and a run may be shared

    write_whole(file, save)


def free(path: str | Path, *, overwrite: bool) -> Path:
    """Return the path of a result, which may exist already only if it is to be replaced."""
    path = Path(path)
    if os.path.exists(path) and not overwrite:  # no OSError if the name is too long: saving reports that
        raise InputError(
            f"{path} exists already: choose another name, or pass overwrite=True to replace it.", code="file-exists"
        )
    return path


def save_json(file: Path, content: dict[str, Any]) -> None:
    """Write a result to a JSON file of the user's choice."""
    with _writable(file):
        write_json(file, content)


def save_text(file: Path, text: str) -> None:
    """Write a result to a text file of the user's choice."""
    with _writable(file):
        write_text(file, text)


def holds(file: Path, text: str) -> bool:
    """Return whether there is a file that ``save_text`` wrote with this text."""
    with _writable(file):
        return file.exists() and plain(file).read_bytes() == text.encode("utf-8", "replace")


def save_csv(file: str | Path, table: pd.DataFrame, *, overwrite: bool) -> Path:
    """Write a table to a CSV file, which must not exist unless it may be overwritten."""
    path = free(file, overwrite=overwrite)
    save_text(path, csv_text(table))
    return path


def csv_text(table: pd.DataFrame) -> str:
    """Write a table as CSV in which no text is a formula: such a cell begins with an apostrophe, as on the page.

    Numbers stay numbers; names of rows and columns are texts too. Lines end as RFC 4180 has it: Python's writer quotes
    only those line ends in a cell that are part of its own.

    >>> import pandas as pd
    >>> csv_text(pd.DataFrame({"why": ["=1+1", "it is"], "score": [-0.5, 1]})).splitlines()
    [',why,score', "0,'=1+1,-0.5", '1,it is,1.0']
    """
    guarded = table.apply(lambda column: column if column.dtype.kind in "biufc" else column.map(_no_formula))
    return guarded.rename(index=_no_formula, columns=_no_formula).to_csv(lineterminator="\r\n")


def _no_formula(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) else cell


def check_writable(file: Path) -> None:
    """Check that a result can be written before it is computed, and create the directories above it."""
    with _writable(file):
        if file.is_dir():
            raise IsADirectoryError("it is a directory")
        plain(file)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}."):
            pass


def save_sealed(file: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write a result to a safetensors file of the user's choice: tensors, facts about them, and a checksum of both."""
    words = json.dumps(facts)
    with _writable(file):
        write_tensors(file, tensors, {"leaveout": words, "crc32": str(_seal(words, tensors))})


@contextmanager
def _writable(file: Path) -> Iterator[None]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise RunError(
            f"{file} cannot be written ({error}): make room, or choose another place.", code="file-not-writable"
        ) from error


def read_sealed(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``save_sealed`` wrote.

    Raises:
        ValueError: if the file is something else, or was changed.
    """
    try:
        with safe_open(str(plain(file)), framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    if "leaveout" not in metadata or "crc32" not in metadata:
        raise ValueError("it has no 'leaveout' or no 'crc32' in its metadata")
    if str(_seal(metadata["leaveout"], tensors)) != metadata["crc32"]:
        raise ValueError("its checksum is not that of what it holds")
    facts = json.loads(metadata["leaveout"])
    if not isinstance(facts, dict):
        raise ValueError("its metadata is not an object")
    return tensors, facts


def checksum(file: Path) -> int:
    """Compute the CRC-32 of a file."""
    crc = 0
    with file.open("rb") as opened:
        while block := opened.read(BLOCK):
            crc = crc32(block, crc)
    return crc


def tensor_checksum(tensor: Tensor, start: int = 0) -> int:
    """Compute the CRC-32 of a tensor's dtype, shape and values."""
    crc = crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), start)
    return crc32(tensor_bytes(tensor).data, crc) if tensor.numel() else crc


def _seal(words: str, tensors: dict[str, Tensor]) -> int:
    crc = crc32(words.encode())
    for key in sorted(tensors):
        crc = tensor_checksum(tensors[key], crc32(key.encode(), crc))
    return crc


def _json_checksum(content: dict[str, Any]) -> int:
    return crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary file, sync it to disk, and rename it: after a crash there is the old file or the new one.

    The temporary file is in a new directory that belongs to this user alone: nobody can have put a link there, and what
    a library leaves in it when the process is killed can be recognised by the directory's name.
    """
    folder = Path(tempfile.mkdtemp(prefix=f".{file.name}.", dir=file.parent))
    try:
        write(folder / "new")
        _sync(folder / "new")
        os.replace(folder / "new", file)
        _sync(file.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_opened(file: Path, write: Callable[[BinaryIO], object]) -> None:
    """Do the same with an open file and no directory: creating and removing one takes as long as the rest.

    Nobody can have put a link in the file's place: it is newly created, and written through its descriptor.
    """
    aside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666)
    try:
        with open(descriptor, "wb") as opened:
            write(opened)
            opened.flush()
            os.fsync(descriptor)
        os.replace(aside, file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _sync(file.parent)


def or_null(value: Any) -> Any:
    """Return the value, or None for NaN and infinity, which JSON does not have.

    >>> or_null(float("nan")), or_null(2.5), or_null("x")
    (None, 2.5, 'x')
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


def asides(names: str) -> str:
    """Return a pattern for what a killed writer of such names leaves: files, and directories of ``write_whole``."""
    return rf"\.(?:{names})\.(?:\d+|[a-z0-9_]{{8}})"


def _sync(path: Path) -> None:
    """Sync a file or a directory to disk, if its file system can; some network ones cannot for directories."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def is_full(error: Exception) -> bool:
    """Say whether an error means that the disk, or the user's quota, takes no more data."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
