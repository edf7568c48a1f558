"""Batches stored with the run, because the data set does not give the same batch twice: augmentation, masking.

A batch is a nested structure of tensors. The structure is in the manifest, once; the tensors are in the shard of their
step, each as zlib-compressed bytes, with its dtype and shape beside them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from zlib_ng import zlib_ng

from leaveout._util.generators import undisturbed
from leaveout._util.tensor_bytes import tensor_bytes
from leaveout.errors import RunError, UnsupportedError
from leaveout.task import batches
from leaveout.task.batches import Batch

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
"""The position of a dtype here is what is written; never change the order."""

MOST_BYTES = 1 << 36
"""The largest tensor that is read."""


def key(step: int, part: int) -> str:
    """Return the prefix of the names of a micro-batch's tensors."""
    return f"batch/{step}/{part}/"


def structure(batch: Batch) -> Any:
    """Return the nested structure with a number in place of each tensor, as plain lists and dictionaries.

    >>> structure({"x": torch.zeros(2), "y": (torch.zeros(2),)})
    {'dict': {'x': 0, 'y': {'tuple': [1]}}}
    """
    place = iter(range(len(batches.leaves(batch))))

    def of(nest: Any) -> Any:
        if isinstance(nest, Mapping):
            return {"dict": {str(name): of(value) for name, value in nest.items()}}
        if isinstance(nest, tuple | list):
            return {"tuple" if isinstance(nest, tuple) else "list": [of(value) for value in nest]}
        if not isinstance(nest, Tensor) or nest.dtype not in DTYPES:
            kind = str(nest.dtype) if isinstance(nest, Tensor) else type(nest).__name__
            raise UnsupportedError(
                f"A batch holds a {kind}, which cannot be kept with the run: let batches have ordinary tensors only.",
                code="batch-not-keepable",
            )
        return next(place)

    return of(batch)


def rebuilt(nest: Any, tensors: list[Tensor]) -> Batch:
    """Return the batch of that structure."""
    if isinstance(nest, int):
        return tensors[nest]
    ((kind, values),) = nest.items()
    if kind == "dict":
        return {name: rebuilt(value, tensors) for name, value in values.items()}
    parts = [rebuilt(value, tensors) for value in values]
    return tuple(parts) if kind == "tuple" else parts


def packed(batch: Batch, start: str) -> dict[str, Tensor]:
    """Return the tensors of a batch as they are written."""
    written: dict[str, Tensor] = {}
    for place, leaf in enumerate(batches.leaves(batch)):
        content = zlib_ng.compress(tensor_bytes(leaf).tobytes(), 2)
        written[f"{start}{place}"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        written[f"{start}{place}/shape"] = torch.tensor([DTYPES.index(leaf.dtype), *leaf.shape])
    return written


def unpacked(tensors: dict[str, Tensor], start: str, nest: Any) -> Batch:
    """Return a batch from its written tensors."""
    count = sum(name.endswith("/shape") for name in tensors)
    return rebuilt(nest, [_tensor(tensors[f"{start}{i}"], tensors[f"{start}{i}/shape"]) for i in range(count)])


def _tensor(bytes_: Tensor, shape: Tensor) -> Tensor:
    number, *size = shape.tolist()
    dtype = DTYPES[number]
    expected = int(np.prod(size, dtype=object)) * dtype.itemsize
    if min(size, default=0) < 0 or expected > MOST_BYTES:
        raise ValueError("a shape beyond all bounds")
    try:
        raw = zlib_ng.decompressobj().decompress(bytes_.numpy().tobytes(), expected + 1)
    except zlib_ng.error as error:  # type: ignore[misc]
        raise ValueError(str(error)) from None
    if len(raw) != expected:
        raise ValueError("a tensor of another size than its shape says")
    if not size or not expected:
        return torch.zeros(size, dtype=dtype) if not expected else torch.frombuffer(bytearray(raw), dtype=dtype)[0]
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(size)


def gives_something_else(dataset: Dataset, ids: Tensor, batch: Batch, collate: Callable | None) -> bool:
    """Say whether a data set gives a different batch for the same ids; no random generator is advanced."""
    collate = None if collate is default_collate else collate
    with undisturbed():
        try:
            again = batches.read(dataset, ids.tolist(), collate)
        except Exception:  # noqa: BLE001 - a data set that cannot be read here is compared when it is scored
            return False
    return batches.fingerprint(again) != batches.fingerprint(batch)


def is_random(dataset: Dataset, collate: Callable | None, count: int = 16) -> bool:
    """Say whether a data set gives its first examples differently each time; no random generator is advanced.

    >>> is_random(torch.utils.data.TensorDataset(torch.zeros(3)), default_collate)
    False
    """
    ids = torch.arange(min(count, batches.size(dataset)))
    collate = None if collate is default_collate else copy.copy(collate)  # some have their own generator
    with undisturbed():
        try:
            first = batches.read(dataset, ids.tolist(), collate)
        except Exception:  # noqa: BLE001 - as above
            return False
        return gives_something_else(dataset, ids, first, collate)


class BatchBudget:
    """How much disk space the kept batches take, estimated from how well the first one compresses."""

    def __init__(self, budget: int) -> None:
        self._budget, self._used = budget, 0
        self._ratio: float | None = None

    def take(self, batch: Batch, step: int) -> int:
        """Count one more batch and return its size; refuse it if it exceeds the budget."""
        size = sum(leaf.numel() * leaf.element_size() for leaf in batches.leaves(batch))
        if self._ratio is None:
            small = sum(tensor.numel() for tensor in packed(batch, "").values())
            self._ratio = min(1.0, small / max(1, size))
        self._used += round(size * self._ratio)
        if self._used > self._budget:
            raise RunError(
                f"The data set gives other examples each time it is read, so batches are kept with the run; those of "
                f"{step} steps take {self._used / 1e6:,.0f} MB and disk={self._budget / 1e6:,.0f} MB is all that was "
                "allowed: give Recorder a larger disk=, or train on data that is augmented beforehand.",
                code="batches-over-budget",
            )
        return size
