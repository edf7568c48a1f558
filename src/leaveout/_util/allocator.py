"""The allocator, told to keep what is freed: large stacks are allocated anew at every step."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# glibc's mallopt parameters and their defaults.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_DEFAULT_TRIM, _DEFAULT_MMAPS = 128 * 1024, 65536


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory with the process while this lasts, to be used again instead of being asked for anew.

    glibc returns every large block to the system at once, and each fresh one is filled with zeros page by page: on
    stacks of tens of megabytes that takes longer than the arithmetic. Other allocators are left alone.
    """
    library = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
    if library is None:
        yield
        return
    library.malloc_trim(0)  # what came before, a training say, may have left gigabytes of freed memory
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        library.mallopt(_MMAP_MAX, _DEFAULT_MMAPS)
        library.mallopt(_TRIM_THRESHOLD, _DEFAULT_TRIM)
        library.malloc_trim(0)


def returned() -> None:
    """Give freed memory back to the system now: what lies between blocks in use as well."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
