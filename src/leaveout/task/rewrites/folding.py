"""Linear layers of many models on one batch, as one large matrix product instead of many small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Folded(TorchFunctionMode):
    """Computes x·Wᵀ as (W·xᵀ)ᵀ.

    With weights stacked over models and inputs shared, ``vmap`` turns W·xᵀ into one product of all models' rows with
    xᵀ, and its gradient into another; x·Wᵀ would become a batch of thin products, which is several times slower.
    """

    def __torch_function__(
        self, function: Callable, _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if function is F.linear and (args[0] if args else named["input"]).ndim > 1:
            return _linear(*args, **named)
        return function(*args, **named)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - as in F.linear
    out = (weight @ input.flatten(0, -2).mT).mT
    out = out if bias is None else out + bias
    return out.unflatten(0, input.shape[:-1])
