"""Packed sequences built from operations that have derivatives under every transform.

A packed batch holds position 0 of all its sequences, then position 1 of those that are longer, and so on: b_t rows for
position t, the longest sequences first. PyTorch's own packing reads the values of b_t in its backward pass, where a
transform has none. Here the rows are looked up by index.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor


def integers(values: Tensor) -> list[int]:
    """Read the integers; ``vmap`` over them and traces raise a RuntimeError.

    They are read one by one: reading them all at once would go unnoticed by a trace, which would then use these lengths
    for the next batch.
    """
    return [int(value) for value in values]


def numbers(values: Tensor) -> Tensor:
    """Return the same integers outside of any transform, where their values can be read."""
    own = torch.tensor(integers(values), dtype=torch.int64)
    while torch._C._functorch.is_functorch_wrapped_tensor(own):  # torch 2.6 wraps what is made inside a transform
        own = torch._C._functorch.get_unwrapped(own)
    return own


def packed(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Pack sequences, longest first: the rows, and b_t for every position.

    >>> packed(torch.tensor([[[1.0], [2.0]], [[3.0], [0.0]]]), torch.tensor([2, 1]), True)
    (tensor([[1.],
            [3.],
            [2.]]), tensor([2, 1]))
    """
    padded = padded.transpose(0, 1) if batch_first else padded
    own = integers(lengths)
    sizes = [sum(length > position for length in own) for position in range(max(own))]
    rows = torch.cat([position * padded.shape[1] + torch.arange(size) for position, size in enumerate(sizes)])
    return padded.flatten(0, 1)[rows.to(padded.device)], torch.tensor(sizes)


def unpacked(
    data: Tensor, sizes: Tensor, batch_first: bool, padding_value: float, total_length: int = -1
) -> tuple[Tensor, Tensor]:
    """Pad packed sequences, longest first, and return their lengths.

    >>> unpacked(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([2, 1]), True, 0.0)
    (tensor([[1., 2.],
            [3., 0.]]), tensor([2, 1]))
    """
    own = integers(sizes)
    starts, count = [0, *accumulate(own)], own[0]
    longest = max(len(own), total_length)
    lengths = torch.tensor([sum(size > place for size in own) for place in range(count)])
    rows = torch.full((longest, count), len(data))  # the row of the padding
    for position, size in enumerate(own):
        rows[position, :size] = torch.arange(starts[position], starts[position] + size)
    padding = torch.full_like(data[:1], padding_value)
    padded = torch.cat([data, padding])[rows.to(data.device)]
    return padded.transpose(0, 1) if batch_first else padded, lengths
