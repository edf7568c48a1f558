"""Writes safetensors files straight from the tensors' own memory, with the checksum taken on the way."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from io import RawIOBase
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from leaveout._util.files import write_whole

Rows: TypeAlias = Sequence[Tensor]
"""Tensors of one type and shape, which are written as one with a further first dimension, without being joined."""

PIECE = 1 << 20
"""How many bytes of small tensors are joined before they are written."""

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""As the format names them."""


def write_tensors_checked(file: Path, tensors: Mapping[str, Tensor | Rows]) -> int:
    """Write a safetensors file that is there whole or not at all, and return its CRC-32.

    A list of tensors becomes one tensor with a row for each. Nothing is copied in memory that is contiguous and on the
    processor already: of a shard of many megabytes, a second copy and a second reading would cost as much as the rest.
    """
    # Wide types first: the format wants every tensor at a multiple of its own width.
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

    def write(aside: Path) -> None:
        nonlocal crc
        with aside.open("wb", buffering=0) as opened:
            for block in (len(words).to_bytes(8, "little"), words):
                opened.write(block)
                crc = zlib.crc32(block, crc)
            for joined in _joined([value for _, value in ordered]):
                crc = _written(opened, joined, crc)

    write_whole(file, write)
    return crc


def _first(value: Tensor | Rows) -> Tensor:
    return value if isinstance(value, Tensor) else value[0]


def _joined(values: Sequence[Tensor | Rows]) -> Iterator[Tensor]:
    """Yield tensors in their order, small ones in one piece: each piece costs calls, and the training thread waits."""
    waiting: list[Tensor] = []
    size = 0
    for row in chain.from_iterable([value] if isinstance(value, Tensor) else value for value in values):
        more = row.numel() * row.element_size()
        alike = waiting and row.dtype == waiting[0].dtype and row.device == waiting[0].device
        if waiting and not (alike and size + more <= PIECE):
            yield _whole(waiting)
            waiting, size = [], 0
        waiting.append(row)
        size += more
    if waiting:
        yield _whole(waiting)


def _whole(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat([row.detach().reshape(-1) for row in rows])


def _written(opened: RawIOBase, tensor: Tensor, crc: int) -> int:
    if not tensor.numel():
        return crc
    data = tensor.detach().cpu().contiguous().flatten()
    if data.stride(0) != 1:  # a single value of a larger tensor counts as contiguous
        data = data.clone(memory_format=torch.contiguous_format)
    left = data.view(torch.uint8).numpy().data
    crc = zlib.crc32(left, crc)
    while left:  # a system writes no more than two gigabytes at a time
        left = left[opened.write(left) or 0 :]
    return crc
