"""BatchNorm in training mode as a function of the weights of the batch's examples.

With weights w, and p positions (pixels, time steps) per example and channel,

    n = p Σ w,   μ = Σ w x / n,   σ² = Σ w (x − μ)² / n,   y = (x − μ)/√(σ² + ε) · γ + β
    running mean ← (1 − m) · running mean + m μ,   running variance ← (1 − m) · running variance + m σ² n/(n − 1)

With weights of 0 and 1 this is the batch without the examples of weight 0; with all weights 1 it is what PyTorch
computes. Everything is written out, out of place, so that there are derivatives of every order in the inputs,
parameters, weights and incoming running statistics (PyTorch's own kernel has none in the latter), under transforms and
in traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout.errors import InputError, UnsupportedError
from leaveout.task.modules import COUNT
from leaveout.task.rewrites.function_mode import FunctionMode


@contextmanager
def weighted_batch_norm(
    weights: Float[Tensor, " batch"] | None, buffers: Mapping[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Compute BatchNorm and InstanceNorm by their formulas inside this context, with these weights of the examples.

        with weighted_batch_norm(weights, buffers) as new:
            outputs = functional_call(model, {**params, **buffers}, (x,))

    Afterwards ``new`` has the new value of every buffer that the pass changed, by name; ``buffers`` stay as is. Enter
    the context inside the function that is transformed, and return ``new`` from there. In evaluation mode the running
    statistics are used as they are, with derivatives in them.

    *If all examples are left out* (all weights 0) no batch was seen: the running statistics and their count stay as
    they were, and the outputs are finite but meaningless. *If a single value is left* (n = 1) the unbiased variance is
    not defined. PyTorch raises an error for such a batch. So does this function, if it can read the weights' values;
    under ``vmap`` and in a trace the new running variance is NaN. ``refuse_single_values`` checks beforehand.

    Args:
        weights: of the examples, one per row of what BatchNorm sees; None for weights of 1, which keeps left-out
            examples in the statistics.
        buffers: the very tensors given to ``functional_call``: they are recognised by identity.
    """
    mode = _Weighted(weights, buffers)
    with mode:
        yield mode.new


def refuse_single_values(weights: Float[Tensor, "*rows batch"], positions: int) -> None:
    """Raise an ``InputError`` if the weights leave one value per channel, which has no unbiased variance.

    Args:
        weights: of a batch's examples, in one row or several.
        positions: the fewest that any BatchNorm of the model sees per example: 1 for ``BatchNorm1d`` of vectors.
    """
    left = weights.sum(-1) * positions
    if bool(((left > 0) & (left <= 1)).any()):
        raise InputError(
            "After leaving examples out, a batch has a single value per channel, and BatchNorm has no variance of that "
            "(PyTorch raises an error for it): use larger batches, leave fewer examples of one batch out, or keep them "
            "in the statistics with statistics='stay'.",
            code="batch-norm-single-value",
        )


class _Call(NamedTuple):
    """The arguments of ``torch.batch_norm`` and ``torch.instance_norm``."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    training: bool
    momentum: float
    eps: float
    cudnn_enabled: bool

    @property
    def values(self) -> Tensor:
        """The input; half precision is converted to float32, as PyTorch does for statistics."""
        return self.input.float() if self.input.dtype in (torch.float16, torch.bfloat16) else self.input

    def normalised(self, mean: Tensor, var: Tensor) -> Tensor:
        """Compute (x − μ)/√(σ² + ε) · γ + β, for μ and σ² per channel, or per example and channel.

        This is computed as x times one number plus another, as in PyTorch: x has many elements, channels are few.
        """
        x = self.values

        def spread(values: Tensor) -> Tensor:
            return values.view(*(() if values.ndim == 2 else (1,)), *values.shape, *(1 for _ in x.shape[2:]))

        times = (var + self.eps).rsqrt()
        times = times if self.weight is None else times * self.weight
        plus = -mean * times
        plus = plus if self.bias is None else plus + self.bias
        return (x * spread(times) + spread(plus)).to(self.input.dtype)


class _Weighted(FunctionMode):
    """Replaces the functions that compute and update statistics."""

    def __init__(self, weights: Tensor | None, buffers: Mapping[str, Tensor]) -> None:
        self.new: dict[str, Tensor] = {}
        self._weights = weights
        self._buffers = buffers
        self._names = {id(value): name for name, value in buffers.items()}
        handlers: dict[Any, Callable] = {torch.batch_norm: self._batch_norm, torch.instance_norm: self._instance_norm}
        # Modules count their batches in place, and read the count as a number. The count is kept here instead, and
        # they read NaN, which can be recognised later.
        for advance in (Tensor.add_, Tensor.__iadd__):
            handlers[advance] = self._unless_count(advance, lambda count: count)
        for read in (Tensor.__float__, Tensor.item):
            handlers[read] = self._unless_count(read, lambda _: math.nan)
        super().__init__(handlers)

    def _unless_count(self, method: Callable, answer: Callable[[Tensor], Any]) -> Callable:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            counts = self._names.get(id(tensor), "").endswith(COUNT)
            return answer(tensor) if counts else method(tensor, *args, **kwargs)

        return call

    def _batch_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        call = _Call(*args, **kwargs)
        if not call.training:
            return self._by_running(call)
        n, mean, var = _moments(call.values, self._example_weights(call.values))
        if call.running_mean is not None:
            _check_single(n)
            self._update(call, n, mean, var * (n / (n - 1)), counted=True)
        return call.normalised(mean, var)

    def _instance_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        """Normalise each example by its own statistics; the running ones follow their weighted mean over the batch."""
        call = _Call(*args, **kwargs)
        if call.running_mean is None:
            return torch.instance_norm(*call)
        if not call.training:
            return self._by_running(call)
        weights = self._example_weights(call.values)
        positions = call.values.flatten(2)
        mean, var = positions.mean(-1), positions.var(-1, correction=0)
        n = weights.sum()
        share = (weights / _above_zero(n)).unsqueeze(1)
        unbiased = var * (positions.shape[-1] / (positions.shape[-1] - 1))
        self._update(call, n, (share * mean).sum(0), (share * unbiased).sum(0), counted=False)
        return call.normalised(mean, var)

    def _by_running(self, call: _Call) -> Tensor:
        return call.normalised(self._current(call.running_mean), self._current(call.running_var))

    def _example_weights(self, x: Tensor) -> Tensor:
        if self._weights is None:
            return torch.ones(len(x), dtype=x.dtype, device=x.device)
        if len(self._weights) != len(x):
            raise UnsupportedError(
                f"A BatchNorm sees {len(x)} rows of a batch of {len(self._weights)} examples, so it is not known which "
                "rows are whose: give it one row per example, with time or patches as further dimensions, or keep "
                "left-out examples in the statistics with statistics='stay'.",
                code="batch-norm-rows-unknown",
            )
        return self._weights.to(x.dtype)

    def _update(self, call: _Call, n: Tensor, mean: Tensor, var: Tensor, *, counted: bool) -> None:
        """Move the running statistics towards these, unless no example is left."""
        names = [self._names.get(id(each)) for each in (call.running_mean, call.running_var)]
        if None in names:
            raise InputError(
                "A BatchNorm's running statistics are not among the buffers given: give every buffer of the model, the "
                "same tensors as to functional_call.",
                code="batch-norm-buffers-missing",
            )
        factor: Any = call.momentum
        count = str(names[0]).removesuffix("running_mean") + COUNT
        if counted and count in self._buffers:
            batches = self.new.get(count, self._buffers[count])
            self.new[count] = batches + (n > 0)
            factor = 1 / (batches + 1).to(mean.dtype) if math.isnan(call.momentum) else call.momentum
        for name, running, now in ((names[0], call.running_mean, mean), (names[1], call.running_var, var)):
            old = self._current(running)
            moved = (1 - factor) * old + factor * now.to(old.dtype)
            self.new[str(name)] = torch.where(n > 0, moved, old)

    def _current(self, running: Any) -> Tensor:
        """Return a running statistic, including updates by earlier layers of this pass that share it."""
        return self.new.get(self._names.get(id(running), ""), running)


def _moments(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return n, μ and σ² per channel; the weights are applied to each example's sums, not to its many positions.

    With any number c per channel, σ² = Σ w (x − c)² / n − (μ − c)². With c = μ held constant there is no cancellation,
    and c has no derivative, which saves the passes over x that the derivative of x − μ would take.
    """
    positions = math.prod(x.shape[2:])
    n, sums = weights.sum() * positions, _positions_summed(x)
    middle = sums.detach().mean(0) / positions
    apart = x - middle.view(1, -1, *(1 for _ in x.shape[2:]))
    off = weights @ (sums - positions * middle) / _above_zero(n)
    var = weights @ _positions_summed(apart.square()) / _above_zero(n) - off.square()
    return n, weights @ sums / _above_zero(n), var


def _positions_summed(x: Tensor) -> Float[Tensor, "batch channels"]:
    return x.sum(list(range(2, x.ndim))) if x.ndim > 2 else x


def _above_zero(n: Tensor) -> Tensor:
    """Return a safe denominator: n, or 1 if no example is left and the sums are 0."""
    return torch.where(n > 0, n, torch.ones_like(n))


def _check_single(n: Tensor) -> None:
    try:
        refuse_single_values(n.detach().unsqueeze(-1), 1)
    except RuntimeError:
        # Under vmap or in a trace the value is not available.
        return
