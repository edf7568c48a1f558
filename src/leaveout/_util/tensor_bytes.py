"""The values of a tensor as bytes, without a copy where there need not be one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SHARED = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8}
"""Dtypes that numpy has too; it needs fewer calls than PyTorch to read them."""


def tensor_bytes(tensor: Tensor) -> np.ndarray:
    """Return a tensor's values as bytes on the CPU, in the order of its dimensions; of a sparse one, with their places.

    >>> tensor_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T).tolist()
    [1, 3, 2, 4]
    """
    if tensor.layout is not torch.strided:
        return np.concatenate([tensor_bytes(part) for part in _parts(tensor)])
    if not tensor.numel():
        return np.zeros(0, np.uint8)
    if tensor.dtype in SHARED and tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor.detach().numpy().reshape(-1).view(np.uint8)
    data = tensor.detach().cpu().contiguous().flatten()
    if data.stride(0) != 1:  # a single value of a larger tensor counts as contiguous
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(torch.uint8).numpy()


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the ordinary tensors that a sparse one consists of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
