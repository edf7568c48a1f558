"""Finite differences of the gradient as plain autograd computes it: the reference for every second derivative.

Nothing here uses ``torch.func``. A difference across a kink (a ReLU that switches within the step) can be detected:
the differences to the two sides then disagree. It is computed again, with another step or direction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leaveout._util.trees import Params, each

MISSING = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
"""What PyTorch raises if it has no rule for an operation."""

STEPS = {torch.float64: (1e-5, 1e-7, 1e-6, 1e-8), torch.float32: (1e-2, 1e-3)}
"""Step lengths to try, relative to the parameters."""

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-2}
SIDES = {torch.float64: 1e-3, torch.float32: 1e-1}
"""How much a product may differ from a difference, and the differences to the two sides from each other."""

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
        missed = norm(each(torch.sub, product, self.changes[which]))
        return missed <= self.tolerance * self._scale(which)

    def agrees_transposed(self, product: Params, which: int = 0) -> bool:
        """Say whether the product is Jᵀ times a direction: ⟨Jᵀu, v⟩ = ⟨u, Jv⟩."""
        other = 1 - which
        missed = abs(inner(product, self.directions[other]) - inner(self.directions[which], self.changes[other]))
        return missed <= self.tolerance * norm(self.directions[which]) * self._scale(other)

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
        ends = [
            (slope(each(lambda p, d: p + step * d, at, d)), slope(each(lambda p, d: p - step * d, at, d)))  # noqa: B023
            for d in directions
        ]
        if not all(finite(end) for pair in ends for end in pair):
            continue
        changes = tuple(each(lambda a, b: (a - b) / (2 * step), *pair) for pair in ends)  # noqa: B023
        sides = [each(lambda a, b, c: (a + b - 2 * c) / (2 * step), *pair, here) for pair in ends]  # noqa: B023
        floor = FLOOR * norm(here)
        apart = max(norm(s) / max(norm(c), floor, 1e-300) for s, c in zip(sides, changes, strict=True))
        if apart <= SIDES[dtype]:
            tolerance = TOLERANCE[dtype] + 4 * apart
            return Difference(at, here, directions, changes, tolerance)  # type: ignore[arg-type]
    return None


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


def norm(params: Params) -> float:
    """Compute the Euclidean norm."""
    return inner(params, params) ** 0.5


def inner(left: Params, right: Params) -> float:
    """Compute the inner product of two vectors."""
    return float(sum((left[name] * right[name]).sum().detach() for name in left))
