"""Functions that draw random numbers inside PyTorch's own code, written as functions of their draws.

Each does what PyTorch's version does on a CPU, operation by operation, so that values and gradients are equal to the
last bit. The first argument is ``take(kinds, shape)``, which returns the next draw; the others are named as in PyTorch.
"""
# ruff: noqa: A001, A002

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

Take: TypeAlias = Callable[[Sequence[str], Sequence[int]], Tensor]

MASKS = ("bernoulli_", "native_dropout")
"""Operations that draw a mask of the units to keep; the latter on a GPU."""

SELU = 1.7580993408473766
"""The negative of the value that alpha dropout sets units to."""


def dropout(
    take: Take,
    input: Tensor,
    p: float,
    train: bool,
    *,
    features: bool = False,
    alpha: bool = False,
    inplace: bool = False,
) -> Tensor:
    """Drop units: x · m/(1 − p) with a mask m; whole channels with ``features``, keeping moments with ``alpha``."""
    if p == 0 or not train or input.numel() == 0:
        return input
    multiply = input.mul_ if inplace else input.mul
    if p == 1:
        return multiply(torch.zeros((), dtype=input.dtype, device=input.device))
    shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if features else input.shape
    noise = take(MASKS, shape).to(input.dtype)
    if not alpha:
        return multiply(noise.div(1 - p))
    scale = 1 / math.sqrt((SELU * SELU * p + 1) * (1 - p))
    shift = noise.add(-1).mul(SELU * scale).add(SELU * scale * p)
    return multiply(noise.mul(scale)).add_(shift)


def native_dropout(take: Take, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Drop units, and return the mask as well."""
    if train is False:
        return torch.native_dropout(input, p, train)
    mask = take(MASKS, input.shape)
    return input.mul(mask).mul(0.0 if p == 1 else 1 / (1 - p)), mask.clone()


def rrelu(
    take: Take,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    *,
    inplace: bool = False,
) -> Tensor:
    """Multiply x by a random slope where x ≤ 0."""
    if not training:
        return (torch.rrelu_ if inplace else torch.rrelu)(input, lower, upper, training)
    slope = take(("rrelu_with_noise", "rrelu_with_noise_"), input.shape)
    out = torch.where(input <= 0, input * slope, input)
    return input.copy_(out) if inplace else out


def attention(
    take: Take,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute dropout(softmax(QKᵀ·scale + mask)) V from PyTorch's attention weights, with the draw as dropout mask.

    16-bit floats are converted to 32 bits in between, as in PyTorch.
    """
    if dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        narrow = torch.get_autocast_dtype(kind)
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(narrow)
    if query.dtype in (torch.bfloat16, torch.float16):
        wide = attn_mask.float() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        with torch.autocast(kind, enabled=False):
            given = (query.float(), key.float(), value.float(), wide, dropout_p, is_causal)
            return attention(take, *given, scale=scale, enable_gqa=enable_gqa).to(query.dtype)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
    _, weights = torch._scaled_dot_product_attention_math(
        query, key, value, attn_mask, 0.0, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return dropout(take, weights, dropout_p, True) @ value


def recurrent(take: Take, function: Callable, *args: Any) -> tuple[Tensor, ...]:
    """Compute the layers of an RNN, LSTM or GRU one after the other, with dropout between them.

    The arguments are those of ``torch.lstm``: for a padded batch (input, state, weights, ...), or for a packed one
    (data, batch sizes, state, weights, ...).
    """
    packed = isinstance(args[3], Sequence)
    (input, *sizes), (state, weights, biases, layers, p, train, both, *rest) = (
        (args[:2], args[2:]) if packed else (args[:1], args[1:])
    )
    if p == 0 or not train or layers == 1:
        return function(*args)
    batch_first = not packed and rest[0]
    input = input.transpose(0, 1) if batch_first else input
    states = state if isinstance(state, Sequence) else (state,)
    pairs, tensors, ends = len(states[0]) // layers, len(weights) // layers, []
    for i in range(layers):
        start = [each[i * pairs : (i + 1) * pairs] for each in states]
        own = weights[i * tensors : (i + 1) * tensors]
        given = start if isinstance(state, Sequence) else start[0]
        input, *end = function(input, *sizes, given, own, biases, 1, 0.0, train, both, *(() if packed else (False,)))
        ends.append(end)
        if i < layers - 1:
            input = dropout(take, input, p, True)
    input = input.transpose(0, 1) if batch_first else input
    return (input, *(torch.cat(each) for each in zip(*ends, strict=True)))


def _recurrent(function: Callable) -> Callable:
    return lambda take, *args: recurrent(take, function, *args)


LAYERS: dict[Any, Callable] = {
    torch.dropout: dropout,
    torch.dropout_: partial(dropout, inplace=True),
    torch.feature_dropout: partial(dropout, features=True),
    torch.feature_dropout_: partial(dropout, features=True, inplace=True),
    torch.alpha_dropout: partial(dropout, alpha=True),
    torch.alpha_dropout_: partial(dropout, alpha=True, inplace=True),
    torch.feature_alpha_dropout: partial(dropout, features=True, alpha=True),
    torch.feature_alpha_dropout_: partial(dropout, features=True, alpha=True, inplace=True),
    torch.native_dropout: native_dropout,
    torch.rrelu: rrelu,
    torch.rrelu_: partial(rrelu, inplace=True),
    F.scaled_dot_product_attention: attention,
    **{each: _recurrent(each) for each in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
}
"""The replacement of each function."""
