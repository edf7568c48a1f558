"""Batches by example number: reading them from a data set, and telling whether they are the ones trained on."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from leaveout._util.hashing import mixed, row_sums, weights
from leaveout.errors import InputError, kind_of

Batch: TypeAlias = Any
"""What a loader yields: a tensor, or tuples, lists and dicts of them."""

Collate: TypeAlias = Callable[[list], Batch]


def read(dataset: Dataset, ids: Sequence[int], collate: Collate | None = None) -> Batch:
    """The examples with these numbers as one batch, as a ``DataLoader`` would build it.

    >>> read(TensorDataset(torch.arange(4.0)), [2, 0])
    [tensor([2., 0.])]
    """
    # A data set of tensors is indexed at once, unless its class has its own way to read an example.
    if (
        collate is None
        and isinstance(dataset, TensorDataset)
        and type(dataset).__getitem__ is TensorDataset.__getitem__
    ):
        index = torch.as_tensor(ids)
        return [tensor[index] for tensor in dataset.tensors]
    if collate is None and type(dataset) is Subset:
        return read(dataset.dataset, [dataset.indices[i] for i in ids])
    examples = [dataset[i] for i in ids]
    if collate is not None:
        return collate(examples)
    try:
        return default_collate(examples)
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(
            f"Examples {list(ids[:3])}... cannot be joined into a batch ({reason}): let them have tensors of one shape "
            "and nothing that is None, or give collate= the function that joins them.",
            code="examples-do-not-join",
        ) from error


def numbers(ids: Any) -> Tensor:
    """The numbers of a batch's examples, as a tensor of their own.

    >>> numbers(range(3))
    tensor([0, 1, 2])
    """
    try:
        tensor = torch.as_tensor(ids).cpu().clone()
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise InputError(
            f"ids do not name a batch ({error}): give a list of example numbers.", code="ids-not-a-batch"
        ) from None
    if tensor.ndim != 1 or len(tensor) == 0:
        raise InputError(
            f"ids of shape {list(tensor.shape)} do not name a batch: give a list of example numbers.",
            code="ids-not-a-batch",
        )
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(
            f"ids of type {kind} do not name a batch: give a list of example numbers.", code="ids-not-a-batch"
        )
    tensor = tensor.long()
    if (least := int(tensor.min())) < 0:
        raise InputError(
            f"Example number {least} is negative: ids count from 0 in the data set's order.",
            code="id-negative",
        )
    return tensor


def size(dataset: Dataset) -> int:
    """How many examples a data set holds; what only looks like one is refused."""
    if remedy := _not_a_dataset(dataset):
        raise InputError(f"A data set is needed, not {kind_of(dataset)}: give {remedy}.", code="dataset-expected")
    if isinstance(dataset, IterableDataset):
        raise InputError(
            f"{type(dataset).__name__} is an IterableDataset, whose examples have no numbers: use a map-style Dataset.",
            code="examples-without-numbers",
        )
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(
            f"{type(dataset).__name__} has no length, so its examples have no numbers: use a map-style Dataset.",
            code="examples-without-numbers",
        ) from None


def _not_a_dataset(given: Any) -> str | None:
    """Say what to give in place of a loader, or of tensors that stand for a data set."""
    if isinstance(given, DataLoader):
        return "the loader's own, loader.dataset"
    if isinstance(given, Tensor):
        return "inputs and targets together, TensorDataset(inputs, targets)"
    if isinstance(given, tuple) and len(given) > 1 and all(isinstance(part, Tensor) for part in given):
        return "one whose examples are their rows, TensorDataset(*tensors); for a single example, a list that holds it"
    return None


def pick(batch: Batch, i: int) -> Batch:
    """Return one example of a batch, without the batch's dimension.

    >>> pick([torch.tensor([2.0, 0.0])], 1)
    [tensor(0.)]
    """
    return map_leaves(lambda leaf: leaf[i], batch)


def map_leaves(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """The same nest with the function applied to everything that is not a tuple, list or mapping.

    >>> from collections import UserDict
    >>> map_leaves(lambda leaf: leaf + 1, UserDict(x=(1, [2])))
    {'x': (2, [3])}
    """
    if isinstance(batch, Mapping):  # as dictionaries, and what collators give in their stead
        return {key: map_leaves(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [map_leaves(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return function(batch)


def leaves(batch: Batch) -> list[Any]:
    """Everything in the nest that is not a tuple, list or dict, in order."""
    flat: list[Any] = []
    map_leaves(flat.append, batch)
    return flat


def broken(batch: Batch) -> list[int]:
    """The positions of a batch's examples that hold NaN or infinite values.

    >>> broken([torch.tensor([[1.0], [float("nan")]]), torch.tensor([0, 1])])
    [1]
    """
    rows: set[int] = set()
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim:
            rows |= set((~torch.isfinite(leaf)).reshape(len(leaf), -1).any(1).nonzero().flatten().tolist())
    return sorted(rows)


def to(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def fingerprint(batch: Batch) -> list[tuple[int, int]]:
    """For each tensor a checksum of its rows in order, and one that does not see their order.

    >>> a, b = torch.eye(2), torch.eye(2).flip(0)
    >>> (ordered, unordered), (other, same) = fingerprint(a)[0], fingerprint(b)[0]
    >>> ordered == other, unordered == same
    (False, True)
    """
    parts = leaves(batch)
    tensors = [leaf for leaf in parts if isinstance(leaf, Tensor)]
    marks = iter(_marks(tensors) if tensors else ())
    return [next(marks) if isinstance(leaf, Tensor) else _word_mark(leaf) for leaf in parts]


def _word_mark(leaf: Any) -> tuple[int, int]:
    checksum = zlib.crc32(repr(leaf).encode())
    return checksum, checksum


def _marks(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Hash all tensors of a batch at once: calls cost more than the numbers of a small batch."""
    sums = [_row_sums(tensor) for tensor in tensors]
    hashes = np.split(mixed(np.concatenate(sums)), np.cumsum([len(one) for one in sums])[:-1])
    both = [
        _places(len(rows)) @ rows + _kind(tensor.dtype, tensor.shape)
        for rows, tensor in zip(hashes, tensors, strict=True)
    ]
    return list(map(tuple, (mixed(np.stack(both)) >> np.uint64(1)).tolist()))  # signed integers on disk


def _row_sums(tensor: Tensor) -> np.ndarray:
    """Return Σ_j w_j x_j of each row, which is not mixed yet."""
    data = tensor.detach().cpu()
    data = (data.reshape(-1, 1) if data.ndim < 2 else data.flatten(1)).contiguous()
    if data.stride(-1) != 1:  # a single value of a larger tensor counts as contiguous
        data = data.clone(memory_format=torch.contiguous_format)
    return row_sums(data.view(torch.uint8).numpy()) if data.numel() else np.zeros(0, np.uint64)


@lru_cache(maxsize=64)
def _kind(dtype: torch.dtype, shape: torch.Size) -> np.uint64:
    """Hash a tensor's type and shape."""
    return np.uint64(zlib.crc32(f"{dtype} {tuple(shape)}".encode()))


@lru_cache(maxsize=64)
def _places(count: int) -> np.ndarray:
    """Weights that tell the places of rows apart, and some that do not."""
    return np.stack([weights(count), np.ones(count, np.uint64)])


def difference(recorded: list[tuple[int, int]], batch: Batch, again: Callable[[], Batch]) -> str | None:
    """What differs between a recorded batch and the one read now, in words; None where nothing does."""
    now = fingerprint(batch)
    if now == recorded:
        return None
    if fingerprint(again()) != now:
        return (
            "the data set gives something else each time it is read (random augmentation?); record the run with "
            "Recorder(keep_batches=True), or make it return the same example for the same number"
        )
    if len(now) != len(recorded):
        return f"it held {len(recorded)} tensors when it was trained on and holds {len(now)} now"
    which = [i for i, (old, new) in enumerate(zip(recorded, now, strict=True)) if old != new]
    if all(recorded[i][1] == now[i][1] for i in which):
        return "it holds the same examples in another order; give the data set in the order it was trained on"
    parts = leaves(batch)
    names = " and ".join(
        f"tensor {i} (now {str(parts[i].dtype).removeprefix('torch.')} {list(parts[i].shape)})"
        if isinstance(parts[i], Tensor)
        else f"item {i}"
        for i in which
    )
    return f"{names} has other values, another type or another shape; give the data set that was trained on"
