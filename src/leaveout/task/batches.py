"""Batches by example id: reading them from a data set, and checking that they are the ones trained on."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from leaveout._util.hashing import mixed, row_sums, weights
from leaveout._util.tensor_bytes import tensor_bytes
from leaveout.errors import InputError, first_line, kind_of

Batch: TypeAlias = Any
"""What a loader yields: a tensor, or tuples, lists and dicts of them."""

Each: TypeAlias = Float[Tensor, " batch"]
"""One number per example of a batch."""

Collate: TypeAlias = Callable[[list], Batch]

SMALL = 1 << 13
"""Tensors of at most this many bytes are copied, and fingerprinted later."""


def read(dataset: Dataset, ids: Sequence[int], collate: Collate | None = None) -> Batch:
    """Read the examples with these ids as one batch, as a ``DataLoader`` would build it.

    >>> read(TensorDataset(torch.arange(4.0)), [2, 0])
    [tensor([2., 0.])]
    """
    # A data set of tensors is indexed in one call, unless its class overrides how an example is read.
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
        raise InputError(
            f"Examples {list(ids[:3])}... cannot be joined into a batch ({first_line(error)}): let them have tensors "
            "of one shape and nothing that is None, or give collate= the function that joins them.",
            code="examples-do-not-join",
        ) from error


def numbers(ids: Any) -> Tensor:
    """Return the ids of a batch's examples as a new tensor.

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
    """Return the number of examples in a data set; refuse anything that is not a data set."""
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
    """Say what to give instead of a loader, or of tensors used as a data set."""
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
    """Return the same nested structure with the function applied to all that is not a tuple, list or mapping.

    >>> from collections import UserDict
    >>> map_leaves(lambda leaf: leaf + 1, UserDict(x=(1, [2])))
    {'x': (2, [3])}
    """
    if isinstance(batch, Mapping):  # dictionaries, and what collators return instead of them
        return {key: map_leaves(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [map_leaves(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return function(batch)


def leaves(batch: Batch) -> list[Any]:
    """Return everything in the nested structure that is not a tuple, list or dict, in order."""
    flat: list[Any] = []
    map_leaves(flat.append, batch)
    return flat


def broken(batch: Batch) -> list[int]:
    """Return the positions of a batch's examples that hold NaN or infinite values.

    >>> broken([torch.tensor([[1.0], [float("nan")]]), torch.tensor([0, 1])])
    [1]
    """
    rows: set[int] = set()
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim:
            rows |= set((~torch.isfinite(leaf)).reshape(len(leaf), -1).any(1).nonzero().flatten().tolist())
    return sorted(rows)


def to(batch: Batch, device: torch.device) -> Batch:
    """Move the batch to a device."""
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def to_float64(batch: Any) -> Any:
    """Convert the floating-point tensors of a batch, or of parameters, to float64."""
    return converted(batch, torch.float64)


def converted(batch: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors of a batch, or of parameters, to a dtype."""
    return map_leaves(partial(_leaf_converted, dtype), batch)


def _leaf_converted(dtype: torch.dtype, leaf: Any) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def fingerprint(batch: Batch) -> list[tuple[int, int]]:
    """Return, for each tensor, a checksum of its rows in order, and one that does not depend on their order.

    >>> a, b = torch.eye(2), torch.eye(2).flip(0)
    >>> (ordered, unordered), (other, same) = fingerprint(a)[0], fingerprint(b)[0]
    >>> ordered == other, unordered == same
    (False, True)
    """
    return fingerprints([leaves(batch)])[0]


class Summed(NamedTuple):
    """The sums of a tensor's rows, and a hash of its dtype and shape: the ingredients of its fingerprint."""

    sums: np.ndarray
    kind: np.uint64


def noted(batch: Batch) -> list[Any]:
    """Return the leaves of a batch to be fingerprinted later, independent of what happens to its tensors until then.

    A small tensor is copied; of a large one only the sums of its rows are kept. Fingerprinting many batches together
    is faster.

    >>> x = torch.eye(2)
    >>> later = noted(x)
    >>> wanted = fingerprint(x)
    >>> fingerprints([later, noted(x.zero_())])[0] == wanted
    True
    """
    return [_kept(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves(batch)]


def _kept(tensor: Tensor) -> Tensor | Summed:
    if tensor.numel() * tensor.element_size() <= SMALL:
        return tensor.detach().clone()
    return Summed(_row_sums(tensor), _kind(tensor.dtype, tensor.shape))


def fingerprints(noted: Sequence[Sequence[Any]]) -> list[list[tuple[int, int]]]:
    """Fingerprint many batches, given their leaves: tensors of one dtype and shape together, which saves calls."""
    alike: dict[tuple, list[tuple[int, int]]] = {}  # batch and position of the tensors of each kind
    marks: list[list[tuple[int, int]]] = [[(0, 0)] * len(parts) for parts in noted]
    for number, parts in enumerate(noted):
        for place, leaf in enumerate(parts):
            if isinstance(leaf, Tensor):
                alike.setdefault((Tensor, leaf.dtype, leaf.shape), []).append((number, place))
            elif isinstance(leaf, Summed):
                alike.setdefault((Summed, leaf.kind, len(leaf.sums)), []).append((number, place))
            else:
                checksum = zlib.crc32(repr(leaf).encode())
                marks[number][place] = checksum, checksum
    tensors = [[noted[number][place] for number, place in places] for places in alike.values()]
    for (number, place), mark in zip(chain.from_iterable(alike.values()), _marks(tensors), strict=True):
        marks[number][place] = mark
    return marks


def _marks(tensors: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
    """Return the two checksums of every tensor, from lists of tensors of one dtype and shape."""
    if not tensors:
        return []
    sums, kinds = zip(*map(_joined_sums, tensors), strict=True)
    ends = np.cumsum([rows.size for rows in sums])
    hashes = np.split(mixed(np.concatenate([rows.ravel() for rows in sums])), ends[:-1])
    totals = [
        flat.reshape(rows.shape) @ _places(rows.shape[1]) + kind
        for flat, rows, kind in zip(hashes, sums, kinds, strict=True)
    ]
    checksums = mixed(np.concatenate(totals)) >> np.uint64(1)  # integers are signed on disk
    return [(ordered, unordered) for ordered, unordered in checksums.tolist()]


def _joined_sums(parts: Sequence[Any]) -> tuple[np.ndarray, np.uint64]:
    """Return the row sums of tensors of one dtype and shape, one row per tensor, and the hash of dtype and shape."""
    first = parts[0]
    if isinstance(first, Summed):
        return np.stack([one.sums for one in parts]), first.kind
    kind = _kind(first.dtype, first.shape)
    if not first.numel():
        return np.zeros((len(parts), 0), np.uint64), kind
    # Joined by numpy: called from the writer thread, PyTorch's kernels would start more threads.
    rows = _row_bytes(first) if len(parts) == 1 else np.concatenate([_row_bytes(tensor) for tensor in parts])
    return row_sums(rows).reshape(len(parts), -1), kind


def _row_sums(tensor: Tensor) -> np.ndarray:
    """Return Σ_j w_j x_j of each row, before mixing."""
    return row_sums(_row_bytes(tensor)) if tensor.numel() else np.zeros(0, np.uint64)


def _row_bytes(tensor: Tensor) -> np.ndarray:
    return tensor_bytes(tensor).reshape(len(tensor) if tensor.ndim and tensor.layout is torch.strided else 1, -1)


@lru_cache(maxsize=64)
def _kind(dtype: torch.dtype, shape: torch.Size) -> np.uint64:
    """Hash a tensor's dtype and shape."""
    return np.uint64(zlib.crc32(f"{dtype} {tuple(shape)}".encode()))


@lru_cache(maxsize=64)
def _places(count: int) -> np.ndarray:
    """Return two columns of weights: one that depends on a row's position, and one that does not."""
    return np.stack([weights(count), np.ones(count, np.uint64)], axis=1)


def difference(recorded: list[tuple[int, int]], batch: Batch, again: Callable[[], Batch]) -> str | None:
    """Describe in words how a recorded batch differs from the one read now; None if they are the same."""
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
    verb = "has" if len(which) == 1 else "have"
    return f"{names} {verb} other values, another type or another shape; give the data set that was trained on"
