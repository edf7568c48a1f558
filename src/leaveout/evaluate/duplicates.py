"""The same input with different labels: at least one of them is wrong, or the input does not determine the label."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from leaveout._util.hashing import mixed, row_hashes
from leaveout._util.tensor_bytes import tensor_bytes
from leaveout._util.trees import Params
from leaveout.compute.resources import Resources
from leaveout.task import batches
from leaveout.task.batches import Batch
from leaveout.task.task import Task

BLOCK = 512


def conflicts(task: Task, params: Params, labels: Int[Tensor, " n"], resources: Resources) -> dict[int, int]:
    """Find the training examples whose input also occurs with a different label, each with one such other example.

    Inputs are everything in a batch but the targets, compared by a 64-bit hash of their bytes.
    """
    hashes = []
    starts = range(0, task.size, BLOCK)
    for start in resources.track(starts, len(starts), "comparing inputs"):
        batch = task.read(range(start, min(start + BLOCK, task.size)))
        with torch.no_grad():
            targets = task.objective.outputs(params, batch)[1]
        hashes.append(input_hashes(batch, targets))
    if any(part is None for part in hashes):
        return {}
    same: dict[int, list[int]] = defaultdict(list)
    for number, value in enumerate(np.concatenate([part for part in hashes if part is not None]).tolist()):
        same[value].append(number)
    label_of = labels.tolist()
    return {
        one: next(other for other in group if label_of[other] != label_of[one])
        for group in same.values()
        if len({label_of[number] for number in group}) > 1
        for one in group
    }


def input_hashes(batch: Batch, targets: Any) -> np.ndarray | None:
    """Hash each example's input; None if the batch holds anything but tensors with one row per example.

    >>> x, y = torch.tensor([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0]]), torch.tensor([0, 1, 0])
    >>> a, b, c = input_hashes([x, y], y)
    >>> bool(a == b), bool(a == c)
    (True, False)
    """
    total = np.zeros(len(targets), np.uint64)
    for place, leaf in enumerate(batches.leaves(batch)):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != len(targets):
            return None
        if leaf.numel() == targets.numel() and bool((leaf.flatten() == targets.flatten()).all()):
            continue
        if leaf.numel():
            total = mixed(total + row_hashes(tensor_bytes(leaf).reshape(len(leaf), -1)) + np.uint64(place))
    return total
