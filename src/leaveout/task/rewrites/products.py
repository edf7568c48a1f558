"""Matrix products by the faster of the two libraries that PyTorch has for CPUs.

PyTorch multiplies float32 matrices with MKL, which uses AVX-512 on Intel's processors only. oneDNN, which PyTorch uses
for convolutions, uses it on all; on AMD's processors it takes half the time. The sums are the same, in another order.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leaveout.task.batches import leaves

aten = torch.ops.aten

SMALLEST = 1 << 21
"""The number of multiplications below which a product takes less time than a call of oneDNN."""

WORTH = 1 << 18
"""The number of elements of a function's inputs below which few or none of its products are that large."""


def product() -> Any:
    """Return oneDNN's operation (X, W, bias, ...) ↦ X·Wᵀ + bias; None if this version of PyTorch does not have it."""
    operation = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if operation is None else operation.default


def fast_products(*args: Any) -> AbstractContextManager:
    """Return a context for a function of these arguments in which large matrix products take less time.

    Whether it changes anything depends only on the processor and on the arguments' shapes, so that a function rounds
    alike whenever it is called.
    """
    large = is_faster() and _elements(args) >= WORTH
    return FastProducts() if large else nullcontext()


@cache
def is_faster() -> bool:
    """Say whether oneDNN multiplies faster than MKL: with AVX-512, on a processor of AMD's."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "AuthenticAMD" in _processor() and _works()


class FastProducts(TorchDispatchMode):
    """Computes large products of float32 matrices with oneDNN, below any transforms."""

    def __torch_dispatch__(self, function: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        faster = REPLACED.get(function)
        result = faster(*args) if faster and not kwargs else None
        return function(*args, **(kwargs or {})) if result is None else result


def _works() -> bool:
    """Say whether oneDNN multiplies two small matrices right: the operation is internal to PyTorch, and may change."""
    if product() is None:
        return False
    left, right = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
    try:
        return torch.equal(_product(left, right, torch.ones(4)), left @ right + 1)
    except (RuntimeError, TypeError):
        return False


def _mm(left: Tensor, right: Tensor) -> Tensor | None:
    if not _is_large(left, right):
        return None
    # The first matrix must be contiguous; if it is not, the transposed product may have less to copy.
    if not left.is_contiguous() and left.numel() > right.numel() * right.is_contiguous() + len(left) * right.shape[1]:
        return _product(right.t(), left.t()).t().contiguous()
    return _product(left, right)


def _addmm(bias: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
    if bias.shape != right.shape[1:] or not _is_plain(bias) or not _is_large(left, right):
        return None
    return _product(left, right, bias)


def _bmm(left: Tensor, right: Tensor) -> Tensor | None:
    """Multiply many matrices by the same one in a single product; ``vmap`` expands a shared matrix in this way."""
    if right.stride(0) or len(right) == 1 or not left.is_contiguous():
        return None
    result = _mm(left.view(-1, left.shape[2]), right[0])
    return None if result is None else result.view(*left.shape[:2], -1)


REPLACED: dict[Any, Callable[..., Tensor | None]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
}


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    # oneDNN would make this copy itself; as a separate operation, a trace makes it once for many products.
    return product()(left.contiguous(), right.t(), bias, "none", [], "")


def _is_large(left: Tensor, right: Tensor) -> bool:
    return left.numel() * right.shape[1] >= SMALLEST and all(
        _is_plain(each) and _is_dense(each) for each in (left, right)
    )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and not tensor._is_zerotensor()


def _is_dense(matrix: Tensor) -> bool:
    """Say whether rows or columns are adjacent in memory; oneDNN is very slow for others, such as expanded ones."""
    rows, columns = matrix.stride()
    return (columns == 1 and rows >= matrix.shape[1]) or (rows == 1 and columns >= matrix.shape[0])


def _elements(args: Any) -> int:
    return sum(leaf.numel() for leaf in leaves(args) if isinstance(leaf, Tensor) and leaf.dtype is torch.float32)


def _processor() -> str:
    """Return the system's description of the processor; Python's own is empty on Linux."""
    listed = Path("/proc/cpuinfo")
    return listed.read_text() if listed.exists() else platform.processor()
