"""Makes the allocator keep freed memory: large stacks are allocated anew at every step."""

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
    """Keep freed memory in the process within this context, to be reused instead of requested again.

    glibc returns every large block to the system immediately, and each new one is filled with zeros page by page: for
    stacks of tens of megabytes that takes longer than the arithmetic. Other allocators are left alone.
    """
    library = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
    if library is None:
        yield
        return
    library.malloc_trim(0)  # earlier work, such as training, may have left gigabytes of freed memory
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        library.mallopt(_MMAP_MAX, _DEFAULT_MMAPS)
        library.mallopt(_TRIM_THRESHOLD, _DEFAULT_TRIM)
        library.malloc_trim(0)


def returned() -> None:
    """Return freed memory to the system now, including memory between blocks in use."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
