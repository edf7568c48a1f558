"""Writes safetensors files directly from the tensors' memory, and computes the checksum while writing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from leaveout._util.files import write_opened
from leaveout._util.tensor_bytes import tensor_bytes

Rows: TypeAlias = Sequence[Tensor]
"""Tensors of one dtype and shape that are written as one with an extra first dimension, without being joined."""

PIECE = 1 << 20
"""How many bytes of small tensors are joined, at most, before they are written."""

SMALL = 1 << 16
"""Rows of a tensor, and whole tensors, of up to this many bytes are joined; larger ones are written as they are."""

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The format's names of the dtypes."""


def write_tensors_checked(file: Path, tensors: Mapping[str, Tensor | Rows]) -> int:
    """Write a safetensors file atomically, and return its CRC-32.

    A list of tensors becomes one tensor with a row for each. Large tensors that are already contiguous and on the CPU
    are not copied in memory: for a shard of many megabytes, a second copy and read would cost as much as the rest.
    """
    # Wide dtypes first: the format requires every tensor to start at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-_first(item[1]).element_size(), item[0]))
    header, offset = {}, 0
    for name, value in ordered:
        rows = [value] if isinstance(value, Tensor) else value
        size = sum(row.numel() * row.element_size() for row in rows)
        shape = list(value.shape) if isinstance(value, Tensor) else [len(rows), *rows[0].shape]
        header[name] = {"dtype": NAMES[rows[0].dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    words = json.dumps(header, separators=(",", ":")).encode()
    words += b" " * (-len(words) % 8)
    crc = 0

    def write(opened: BinaryIO) -> None:
        nonlocal crc
        start = memoryview(len(words).to_bytes(8, "little") + words)
        for piece in chain([start], _pieces([value for _, value in ordered])):
            crc = crc32(piece, crc)
            opened.write(piece)

    write_opened(file, write)
    return crc


def _first(value: Tensor | Rows) -> Tensor:
    return value if isinstance(value, Tensor) else value[0]


def _pieces(values: Sequence[Tensor | Rows]) -> Iterator[memoryview]:
    """Yield the bytes of tensors in order, small ones together: each piece costs calls, for which training waits.

    They are joined by numpy: called from a writing thread, PyTorch's parallel kernels would start further threads.
    Because of these, the training thread's own worker threads would no longer spin between its operations, and its
    small operations would take twice as long.
    """
    waiting: list[np.ndarray] = []
    size = 0
    for block in chain.from_iterable(map(_blocks, values)):
        large = len(block) > SMALL
        if waiting and (large or size + len(block) > PIECE):
            yield _joined(waiting)
            waiting, size = [], 0
        if large:
            yield block.data
        else:
            waiting.append(block)
            size += len(block)
    if size:
        yield _joined(waiting)


def _blocks(value: Tensor | Rows) -> Iterator[np.ndarray]:
    """Yield the bytes of a tensor, or of one tensor per row; small rows are joined first, by a single call."""
    if isinstance(value, Tensor):
        yield tensor_bytes(value)
    elif len(value) > 1 and value[0].numel() * value[0].element_size() <= SMALL and value[0].device.type == "cpu":
        with torch.no_grad():
            joined = torch.stack(list(value))  # in this thread alone
        yield tensor_bytes(joined)
    else:
        yield from map(tensor_bytes, value)


def _joined(blocks: list[np.ndarray]) -> memoryview:
    return (blocks[0] if len(blocks) == 1 else np.concatenate(blocks)).data
