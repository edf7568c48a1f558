"""Normalisations, norms, softmax, cross-entropy and attention from elementary operations.

The reverse derivative of a forward derivative needs them. PyTorch's forward formula of ``layer_norm`` has a wrong
reverse derivative. Its forward formula of the softmax family starts again from the inputs, and the reverse derivative
of that passes over the logits some thirty times, while a dozen passes are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from leaveout.task.rewrites.missing_rules import WrittenOut

COARSE = (torch.float16, torch.bfloat16)
"""Dtypes in which PyTorch's own kernels sum with more precision than the operands have."""


class Elementary(WrittenOut):
    """A context in which these functions are computed from elementary operations, the same up to rounding."""

    @property
    def functions(self) -> dict[Callable, Callable[..., Any]]:
        """The functions, each with what is computed in its place."""
        return FUNCTIONS

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written = self.functions.get(function)
        if written is not None and args and isinstance(args[0], Tensor) and _precise(args[0]):
            value = written(*args, **(kwargs or {}))
            if value is not None:
                return value
        return super().__torch_function__(function, types, args, kwargs)


def _precise(x: Tensor) -> bool:
    """Say whether operations of ``x`` are computed in its own dtype, and that is not a coarse one."""
    return x.dtype not in COARSE and not torch.is_autocast_enabled(x.device.type)


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_cudnn: Any,
    **_options: Any,
) -> Tensor:
    dims = list(range(-len(normalized_shape), 0))
    apart = x - x.mean(dims, keepdim=True)
    out = apart * (apart.square().mean(dims, keepdim=True) + eps).rsqrt()
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _exponentials(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(x − s), their sum, and the shift s, which does not change the result and has no derivative."""
    shift = x.detach().amax(dim, keepdim=True)
    powers = (x - shift).exp()
    return powers, powers.sum(dim, keepdim=True), shift


def _softmax(x: Tensor, dim: int | None = None, *_stacklevel: Any, dtype: Any = None, **_options: Any) -> Tensor | None:
    if dim is None or dtype is not None or not x.is_floating_point():
        return None
    powers, total, _ = _exponentials(x, dim)
    return powers / total


def _norm(
    x: Tensor,
    ord: Any = 2,  # noqa: A002 - PyTorch's name
    dim: Any = None,
    keepdim: bool = False,
    **options: Any,
) -> Tensor | None:
    """Compute a Euclidean norm, whose own forward formula writes to what its reverse derivative needs."""
    given = any(value is not None for value in options.values())
    if ord not in (None, 2, "fro") or given or not x.is_floating_point():
        return None
    squares = x.square().sum() if dim is None else x.square().sum(dim, keepdim)
    if dim is None and keepdim:
        squares = squares.reshape([1] * x.ndim)
    zero = squares == 0  # where the derivative is zero, as PyTorch has it
    return squares.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def _either_norm(x: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor | None:
    return _norm(x, p, dim, keepdim, **options)


def _normalize(x: Tensor, p: Any = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Tensor | None:
    length = _norm(x, p, dim, keepdim=True) if out is None else None
    return None if length is None else x / length.clamp(min=eps)


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor | None:
    one, other = (_normalize(each, 2, dim, eps) for each in torch.broadcast_tensors(x1, x2))
    return None if one is None or other is None else (one * other).sum(dim)


def _cross_entropy(
    outputs: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Compute log Σ exp z − z_y for each element; return None for options that are left to PyTorch."""
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not plain or reduction != "none" or targets.is_floating_point() or outputs.ndim < 2:
        return None
    outputs = outputs.movedim(1, -1)  # the order in which language models store them
    _, total, shift = _exponentials(outputs, -1)
    kept = targets != ignore_index
    chosen = outputs.gather(-1, torch.where(kept, targets, 0).unsqueeze(-1))
    return torch.where(kept, (total.log() + shift - chosen).squeeze(-1), 0.0)


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor | None:
    """Compute softmax(q kᵀ/√d + mask) v; return None for dropout."""
    both = _weighing(query, key, value, *args, **options)
    return None if both is None else both[0]


def _weighing(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_dropout_mask: Any,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """Compute the same, and the softmax; both are zero where a mask hides every key, as in an empty text."""
    if dropout_p or min(query.ndim, key.ndim, value.ndim) < 2:
        return None
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        powers, total, _ = _exponentials(scores, -1)
    else:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(attn_mask.logical_not(), -torch.inf)
        scores = scores + attn_mask
        shift = scores.detach().amax(-1, keepdim=True)
        powers = (scores - shift.masked_fill(shift == -torch.inf, 0.0)).exp()
        total = powers.sum(-1, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
    weights = powers / total
    return weights @ value, weights


FUNCTIONS: dict[Callable, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.softmax: _softmax,
    torch.softmax: _softmax,
    Tensor.softmax: _softmax,
    torch.linalg.vector_norm: _norm,
    torch.norm: _either_norm,
    Tensor.norm: _either_norm,
    F.normalize: _normalize,
    torch.cosine_similarity: _cosine_similarity,
    F.cross_entropy: _cross_entropy,
    F.scaled_dot_product_attention: _attention,
    torch._scaled_dot_product_attention_math: _weighing,  # of attention with dropout
}


class Quicker(Elementary):
    """The same for those functions whose first derivatives are also faster this way.

    PyTorch's cross-entropy copies the logits of language models into another order, and their gradient back.
    """

    @property
    def functions(self) -> dict[Callable, Callable[..., Any]]:
        """The functions, each with what is computed in its place."""
        return QUICKER


QUICKER = {function: FUNCTIONS[function] for function in (F.cross_entropy, F.scaled_dot_product_attention)}
