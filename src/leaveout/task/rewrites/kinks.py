"""The curvature of kinks: ReLU, leaky ReLU, hardtanh, ReLU6, abs and clamp with a second derivative.

Autodiff gives a kink no curvature. But a displacement moves pre-activations across it, and on average over examples
that is curvature: the density of the pre-activation a at the kink times the jump of the slope there. In its place
stands a bump of width h, for a kink at p

    f''(a) = jump · σ'((a − p)/h) / h,        h = 0.2 · 1.2533 · (mean absolute deviation of a over the batch)

which is added to f as ½ f''(a₀) · (a − a₀)² with a₀ = a, held constant: zero, with the derivative zero, and the second
derivative that is wanted, in whichever order derivatives are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from leaveout._util.trees import Params
from leaveout.task.batches import Batch
from leaveout.task.forward import Called
from leaveout.task.rewrites.function_mode import FunctionMode

WIDTH = 0.2 * 1.2533
"""The width of a bump divided by the pre-activation's mean absolute deviation (a Gaussian's σ is 1.2533 times that).

On most networks tried, quartiles give the same scores to a few thousandths of a rank correlation (not on 20News, where
neither helps), but every unit would have to be sorted.
"""

ENOUGH = 4096
"""At least this many values of a channel are used for its mean absolute deviation, if it has as many."""

KINK = "kink "
"""The prefix of the names under which widths are passed with the parameters."""

Points: TypeAlias = Sequence[tuple[float, float]]
"""The positions of a function's kinks, and by how much its slope jumps at each."""


def _relu() -> Points:
    return [(0.0, 1.0)]


def _leaky_relu(negative_slope: float = 0.01) -> Points:
    return [(0.0, 1 - negative_slope)]


def _hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> Points:
    return [(min_val, 1.0), (max_val, -1.0)]


def _relu6() -> Points:
    return [(0.0, 1.0), (6.0, -1.0)]


def _abs() -> Points:
    return [(0.0, 2.0)]


def _clamp(min: Any = None, max: Any = None) -> Points:  # noqa: A002 - as PyTorch names them
    if not all(bound is None or isinstance(bound, Real) for bound in (min, max)):
        return []  # a bound that is a tensor
    return [(float(at), jump) for at, jump in ((min, 1.0), (max, -1.0)) if at is not None]


def _clamp_max(max: Any) -> Points:  # noqa: A002
    return _clamp(None, max)


_nn = torch._C._nn
_method = torch.Tensor
SMOOTHED: dict[Callable, tuple[tuple, tuple, Callable[..., Points]]] = {
    torch.relu: ((torch.relu, _method.relu), (torch.relu_, _method.relu_), _relu),
    _nn.leaky_relu: ((_nn.leaky_relu,), (_nn.leaky_relu_,), _leaky_relu),
    _nn.hardtanh: ((_nn.hardtanh,), (_nn.hardtanh_,), _hardtanh),
    _nn.relu6: ((_nn.relu6,), (_nn.relu6_,), _relu6),
    torch.abs: (
        (torch.abs, torch.absolute, _method.abs, _method.absolute, _method.__abs__),
        (torch.abs_, _method.abs_, _method.absolute_),
        _abs,
    ),
    torch.clamp: (
        (torch.clamp, torch.clip, _method.clamp, _method.clip, torch.clamp_min, _method.clamp_min),
        (torch.clamp_, torch.clip_, _method.clamp_, _method.clip_, torch.clamp_min_, _method.clamp_min_),
        _clamp,
    ),
    torch.clamp_max: ((torch.clamp_max, _method.clamp_max), (torch.clamp_max_, _method.clamp_max_), _clamp_max),
}
"""Functions with kinks: their names, the names of those that write into their argument, and their kinks."""

UNBOUNDED = (torch.clamp, torch.clamp_max)
"""Functions that may well be given infinities, as in ``x.log().clamp(min=-100)``."""


class Kinks(FunctionMode):
    """Gives functions with kinks their curvature.

    Args:
        widths: 1/h by name, from ``inverse_widths``; widths that are missing are computed from the current batch.
    """

    def __init__(self, widths: Params) -> None:
        self._widths, self._count = widths, 0
        handlers: dict[Any, Callable] = {}
        for function, (plain, in_place, points) in SMOOTHED.items():
            handlers |= {name: partial(self._answer, function, points, False) for name in plain}
            handlers |= {name: partial(self._answer, function, points, True) for name in in_place}
        super().__init__(handlers)

    def _answer(
        self,
        function: Callable,
        points_of: Callable[..., Points],
        in_place: bool,
        input: Tensor,  # noqa: A002 - as PyTorch names it
        *args: Any,
        out: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        a = input.clone() if in_place else input
        value = function(a, *args, **kwargs)
        points = points_of(*args, **kwargs)
        if points and a.is_floating_point():
            name = f"{KINK}{self._count}"
            self._count += 1
            finite = torch.nan_to_num(a) if function in UNBOUNDED else a
            value = self._curved(name, finite, value, points)
        target = input if in_place else out
        return value if target is None else target.copy_(value)

    def _curved(self, name: str, a: Tensor, value: Tensor, points: Points) -> Tensor:
        # Other modes may let gradients through ``detach``.
        with torch._C.DisableTorchFunction():
            inverse = self._widths[name] if name in self._widths else inverse_width(a)
            return value + _curvature(a, points, inverse)


class _Noting(Kinks):
    """Notes what functions with kinks are given."""

    def __init__(self) -> None:
        super().__init__({})
        self.noted: Params = {}

    def _curved(self, name: str, a: Tensor, value: Tensor, points: Points) -> Tensor:  # noqa: ARG002
        self.noted[name] = a.detach()
        return value


def _curvature(a: Tensor, points: Points, inverse: Tensor) -> Tensor:
    """Compute ½ f''(a₀) · (a − a₀)², with a₀ = a held constant."""
    still = a.detach()
    away = a - still
    bent: Tensor | None = None
    for at, jump in points:
        slope = torch.sigmoid((still - at if at else still) * inverse)
        term = torch.ops.aten.sigmoid_backward(inverse * (jump / 2), slope)
        bent = term if bent is None else bent + term
    assert bent is not None  # noqa: S101 - there is a kink
    return bent * away.square()


def inverse_width(a: Tensor) -> Tensor:
    """Compute 1/h of each unit, in a shape that broadcasts with ``a``; 0 (no curvature) if its values are all equal.

    Units are columns (batch, units), the last axis of (batch, positions, units), the channels of images.

    >>> inverse_width(torch.tensor([[0.0, 3.0], [1.0, 3.0], [2.0, 3.0], [3.0, 3.0]])) * WIDTH
    tensor([[1., 0.]])
    """
    axis = 1 if a.ndim >= 4 else a.ndim - 1
    values = _thinned(a.detach()).movedim(axis, 0).flatten(1) if a.ndim > 1 else a.detach().reshape(1, -1)
    spread = (values - values.mean(1, keepdim=True)).abs().mean(1)
    inverse = torch.where(spread > 0, 1 / (WIDTH * spread), 0.0)  # 0 too where it is infinite or not a number
    return inverse.reshape([-1 if dim == axis else 1 for dim in range(a.ndim)])


def _thinned(a: Tensor) -> Tensor:
    """Take fewer rows and columns of images, evenly spaced, where a channel has more than ``ENOUGH`` values."""
    if a.ndim < 4:
        return a
    step = max(1, int((a.numel() / a.shape[1] / ENOUGH) ** 0.5))
    return a[..., ::step, ::step]


def inverse_widths(forward: Callable[[Params, Batch], Any], params: Params, parts: Sequence[Batch]) -> Params:
    """Compute 1/h of every call of a function with kinks, in the order of the calls, over a step's micro-batches."""
    passes = []
    for part in parts:
        with _Noting() as noting:
            forward(params, part)
        passes.append(noting.noted)
    widths = {}
    for name in max(passes, key=len):
        seen = [noted[name] for noted in passes if name in noted]
        widths[name] = inverse_width(seen[0] if len(seen) == 1 else _joined(seen))
    return widths


def _joined(parts: list[Tensor]) -> Tensor:
    """Join tensors with the same units; positions may differ in number."""
    if parts[0].ndim < 2 or len({part.shape[1:] for part in parts}) == 1:
        return torch.cat([part.reshape(-1) if part.ndim == 0 else part for part in parts])
    ndim, axis = parts[0].ndim, 1 if parts[0].ndim >= 4 else parts[0].ndim - 1
    flat = torch.cat([part.movedim(axis, -1).reshape(-1, part.shape[axis]) for part in parts])
    return flat.reshape(len(flat), *[1] * (ndim - 2), flat.shape[1]).movedim(-1, axis)


def kinked(
    called: Called,
    params: Params,
    batch: Batch,
    training: frozenset[str],
    within: AbstractContextManager | None = None,
) -> tuple[tuple[Tensor, Any], Params]:
    """Do what ``called.pure`` does, with the curvature of kinks; their widths are among the parameters."""
    widths = {name: tensor for name, tensor in params.items() if name.startswith(KINK)}
    own = {name: tensor for name, tensor in params.items() if name not in widths}
    with Kinks(widths):
        return called.pure(own, batch, training, within)
