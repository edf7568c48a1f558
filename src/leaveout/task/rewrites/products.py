"""Matrix products by the faster of the two libraries that PyTorch has for processors.

PyTorch multiplies float32 matrices with MKL, which uses AVX-512 only on Intel's processors. oneDNN, which PyTorch has
for convolutions, uses it everywhere; on AMD's processors it takes half the time. The sums are the same, taken in
another order.
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
"""Multiplications below which a product takes less time to compute than oneDNN takes to call."""

WORTH = 1 << 18
"""Elements of a function's inputs below which none of its products is that large, or few are."""


def product() -> Any:
    """Return oneDNN's operation (X, W, bias, ...) ↦ X·Wᵀ + bias; None if this PyTorch has none of that name."""
    operation = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if operation is None else operation.default


def fast_products(*args: Any) -> AbstractContextManager:
    """Return a context for a function of these arguments in which large matrix products take less time.

    Whether it does anything depends on the processor and the arguments' shapes alone, so that a function rounds alike
    whenever it is called.
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
    """Computes large products of float32 matrices with oneDNN, beneath whatever transforms surround them."""

    def __torch_dispatch__(self, function: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        faster = REPLACED.get(function)
        result = faster(*args) if faster and not kwargs else None
        return function(*args, **(kwargs or {})) if result is None else result


def _works() -> bool:
    """Multiply two small matrices: the operation is internal to PyTorch, and other versions may have another."""
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
    # The first matrix has to lie in rows; the transposed product may have less to copy.
    if not left.is_contiguous() and left.numel() > right.numel() * right.is_contiguous() + len(left) * right.shape[1]:
        return _product(right.t(), left.t()).t().contiguous()
    return _product(left, right)


def _addmm(bias: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
    if bias.shape != right.shape[1:] or not _is_plain(bias) or not _is_large(left, right):
        return None
    return _product(left, right, bias)


def _bmm(left: Tensor, right: Tensor) -> Tensor | None:
    """Multiply many matrices by one and the same in a single product, as vectors that ``vmap`` has expanded are."""
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
    # The copy that oneDNN's operation would make, as an operation of its own: a trace makes it once for many products.
    return product()(left.contiguous(), right.t(), bias, "none", [], "")


def _is_large(left: Tensor, right: Tensor) -> bool:
    return left.numel() * right.shape[1] >= SMALLEST and all(
        _is_plain(each) and _is_dense(each) for each in (left, right)
    )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and not tensor._is_zerotensor()


def _is_dense(matrix: Tensor) -> bool:
    """Say whether rows or columns follow each other in memory; others, such as expanded ones, take oneDNN very long."""
    rows, columns = matrix.stride()
    return (columns == 1 and rows >= matrix.shape[1]) or (rows == 1 and columns >= matrix.shape[0])


def _elements(args: Any) -> int:
    return sum(leaf.numel() for leaf in leaves(args) if isinstance(leaf, Tensor) and leaf.dtype is torch.float32)


def _processor() -> str:
    """Return what the system says of the processor; on Linux, Python does not know."""
    listed = Path("/proc/cpuinfo")
    return listed.read_text() if listed.exists() else platform.processor()
