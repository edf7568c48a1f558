"""Finite differences of the gradient as plain autograd computes it: the reference for every second derivative.

Nothing here uses ``torch.func``. A difference across a kink (a ReLU that switches within the step) can be detected:
the differences to the two sides then disagree. It is computed again, with another step or direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leaveout._util.trees import Params, distance, each, norm
from leaveout._util.trees import inner as rowwise

MISSING = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
"""What PyTorch raises if it has no rule for an operation."""

STEPS = {torch.float64: (1e-5, 1e-7, 1e-6, 1e-8), torch.float32: (1e-2, 1e-3)}
"""Step lengths to try, relative to the parameters."""

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-2}
SIDES = {torch.float64: 1e-3, torch.float32: 1e-1}
"""How much a product may differ from a difference, and the differences to the two sides from each other."""

SLIGHT = 1e-6
"""Products smaller than this fraction of the gradient's norm are compared as if they had that size."""

ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-2}
"""How much two products with one matrix may contradict each other."""

FLOOR = 1e-2
"""A product is compared relative to its own norm, or to this fraction of the gradient's norm if that is more."""


class Difference(NamedTuple):
    """The gradient at a point and its differences along two directions."""

    at: Params
    gradient: Params
    directions: tuple[Params, Params]
    changes: tuple[Params, Params]
    tolerance: float

    def agrees(self, product: Params, which: int = 0) -> bool:
        """Say whether the product is J times a direction: the difference along it."""
        return distance(product, self.changes[which]) <= self.tolerance * self._scale(which)

    def agrees_transposed(self, product: Params, which: int = 0) -> bool:
        """Say whether the product is Jᵀ times a direction: ⟨Jᵀu, v⟩ = ⟨u, Jv⟩, with both directions for v."""
        u = self.directions[which]
        return all(
            abs(inner(product, v) - inner(u, change)) <= self.tolerance * norm(u) * self._scale(i)
            for i, (v, change) in enumerate(zip(self.directions, self.changes, strict=True))
        )

    @property
    def symmetric(self) -> bool:
        """Say whether J is its own transpose."""
        return self.agrees_transposed(self.changes[0])

    def _scale(self, which: int) -> float:
        return max(norm(self.changes[which]), FLOOR * norm(self.gradient))


def difference(
    slope: Callable[[Params], Params],
    at: Params,
    seed: int = 0,
    padding: Mapping[str, int] | None = None,
    counters: Collection[str] = (),
    here: Params | None = None,
) -> Difference | None:
    """Compute differences of a gradient at a point along two random directions; None if all cross a kink.

    ``padding``: rows of embeddings that training may never move, as ``padding_rows`` returns them. If such a row has
    no gradient, the directions do not move it either: no displacement and no transported vector ever does.
    ``counters`` are integers, such as BatchNorm's count of batches, and are not moved. ``here`` is the gradient at the
    point, if it is known.
    """
    dtype = next(iter(at.values())).dtype
    dtype = dtype if dtype in STEPS else torch.float32
    here = slope(at) if here is None else here
    if not finite(here):
        return None
    generator = torch.Generator().manual_seed(seed)
    still: dict[str, Any] = {n: row for n, row in (padding or {}).items() if n in at and not here[n][row].any()}
    still |= {name: ... for name in counters if name in at}
    for step in STEPS[dtype]:
        directions = (_holding(like(at, generator), still), _holding(like(at, generator), still))
        bent = [_bend(slope, at, direction, step, here) for direction in directions]
        changes, sides = zip(*bent, strict=True)
        if not all(map(math.isfinite, sides)):
            continue
        floor = FLOOR * norm(here)
        apart = max(side / max(norm(change), floor, 1e-300) for side, change in zip(sides, changes, strict=True))
        if apart <= SIDES[dtype]:
            tolerance = TOLERANCE[dtype] + 4 * apart
            return Difference(at, here, directions, changes, tolerance)
    return None


def are_transposed(pulled: Params, pushed: Params, directions: Params, gradient: Params) -> bool:
    """Say whether the stacks of Jᵀu and Jv of some directions belong to one J: ⟨Jᵀu, v⟩ = ⟨u, Jv⟩ up to rounding.

    A difference tells a wrong product from a right one by a few digits, a right product by nearly all. There may be
    fewer of the former than directions. Products that are small beside the gradient may be rounding alone.
    """
    least = SLIGHT * norm(gradient)
    some = {name: directions[name][: len(stack)] for name, stack in pulled.items()}
    missed = rowwise(pulled, directions) - rowwise(some, pushed)
    back, ahead = _norms(pulled).clamp_min(least), _norms(pushed).clamp_min(least)
    scale = torch.outer(back, _norms(directions)) + torch.outer(_norms(some), ahead)
    return bool((missed.abs() <= ROUNDING.get(missed.dtype, ROUNDING[torch.float32]) * scale).all())


def _norms(stack: Params) -> Tensor:
    return rowwise(stack, stack).diagonal().sqrt()


def _bend(
    slope: Callable[[Params], Params], at: Params, direction: Params, step: float, here: Params
) -> tuple[Params, float]:
    """Return the central difference of a gradient, and how far the differences to the two sides are from it.

    The distance is infinite if a gradient is not finite.
    """
    ahead = slope(each(lambda p, d: p + step * d, at, direction))
    behind = slope(each(lambda p, d: p - step * d, at, direction))
    if not (finite(ahead) and finite(behind)):
        return here, math.inf
    change = each(lambda a, b: (a - b) / (2 * step), ahead, behind)
    # One tensor at a time: for a large model, all of them are a gigabyte.
    return change, math.hypot(*(norm({n: (ahead[n] + behind[n] - 2 * here[n]) / (2 * step)}) for n in here))


def like(params: Params, generator: torch.Generator, share: float = 1.0) -> Params:
    """Draw random numbers of about each tensor's scale; of scale 0.1 for a tensor that is all zero."""

    def draw(tensor: Tensor) -> Tensor:
        size = float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return noise.to(tensor.device) * (share * (size or 0.1))

    return each(draw, params)


def padding_rows(model: nn.Module) -> dict[str, int]:
    """Return the rows of embeddings, by name, whose gradient PyTorch leaves out (``padding_idx``)."""
    return {
        f"{name}.weight" if name else "weight": module.padding_idx
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None
    }


def _holding(direction: Params, still: Mapping[str, Any]) -> Params:
    for name, part in still.items():
        direction[name][part] = 0
    return direction


def finite(params: Params) -> bool:
    """Say whether all values are finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in params.values())


def inner(left: Params, right: Params) -> float:
    """Compute the inner product of two vectors."""
    return float(sum((left[name] * right[name]).sum().detach() for name in left))
