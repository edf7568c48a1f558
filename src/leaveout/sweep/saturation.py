"""How a jump of the optimizer's moments is read: with saturation, if later steps divide by the root of one of them.

Adam's later steps move a coordinate by ``size · m / (√v + ε)``. A jump (Δm, Δv) of its moments changes them by

    V(Δm, Δv) = Σ_t U_t [(m_t + β₁^τ Δm) ψ_t(v_t + β₂^τ Δv) − m_t ψ_t(v_t)],      ψ(v) = size/(√v + ε),  τ = t − i

where U_t is what a move at step t is worth. Its derivatives at zero are what the backward vector holds, u_m and u_v,
and ``u_m Δm + u_v Δv`` is unbounded: where the gradients of a batch cancel in a coordinate, v is a millionth of what it
is without one of them. V is bounded, and has the form of a root: with A and B the parts of V due to Δm and to m_t,

    V ≈ u_m Δm (1 + Δv/w_A)^(−1/2) + 2 w_B u_v (1 − (1 + Δv/w_B)^(−1/2))

where w is the second moment at which the root saturates, chosen so that the second derivatives ∂²V/∂m∂v and ∂²V/∂v²
are right too if U_t does not change with t. If no later gradient reaches the coordinate, w = v and this is V itself; if
one does, w is as large as the later second moments. Both are sums over later steps, carried back with the vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from leaveout._util.blocks import Coordinates
from leaveout._util.trees import Params, State
from leaveout.optim import Rule
from leaveout.optim.definition import Division, Hyper, Slots

FLOOR = 1 / 16
"""A second moment counts as shrunk by at most this factor: beyond it, only the left-out example used a coordinate."""

SMALLEST = 1e-30
"""The smallest second moment; a root of a hundredth of ε or less does not matter either."""

PARTS = ("mean_weight", "mean_rate", "square_weight", "square_rate")


BLOCK = 1 << 17
"""How many coordinates are updated at a time: few enough to stay in the CPU cache, many enough to take few calls."""


class Saturation:
    """1/w_A and 1/w_B per coordinate after the step that a backward sweep has reached, with the weights of their means.

    The weights of 1/w_A's mean over later steps are β₁^τ ψ_t, those of 1/w_B's are β₂^τ |m_t| |ψ_t'|.
    """

    def __init__(self, rule: Rule, like: Params) -> None:
        self._rule = rule
        self._alike: dict[tuple[int, torch.dtype], list[str]] = {}
        for name in rule.groups if rule.divides else ():
            self._alike.setdefault((rule.groups[name], like[name].dtype), []).append(name)
        # Parameters with the same hyperparameters are updated together, each is read alone: as a view of its part.
        self._flat = [{part: _joined(like, names).zero_() for part in PARTS} for names in self._alike.values()]
        self._held: dict[str, Params] = {part: {} for part in PARTS}
        for names, flat in zip(self._alike.values(), self._flat, strict=True):
            sizes = [like[name].numel() for name in names]
            for part, values in flat.items():
                views = zip(names, values.split(sizes), strict=True)
                self._held[part] |= {name: own.view(like[name].shape) for name, own in views}

    def read(self, block: Coordinates, jump: Slots, division: Division) -> Slots:
        """Return a jump whose inner product with the backward vector is bounded. Overwrites the jump.

        PyTorch computes x^(−1/2) faster as a power than as ``rsqrt`` on AMD's processors.
        """
        square = jump[division.square]
        if division.mean is not None:
            jump[division.mean] *= _grown(square, block.of(self._held["mean_rate"])).pow_(-0.5)
        # Half of 1 + Δv/w, so that the factor 2 does not need a separate pass.
        half = _grown(square, block.of(self._held["square_rate"]), 0.5)
        whole = torch.addcmul(half, half, half.pow(-0.5), value=0.5**0.5, out=half)
        return {**jump, division.square: square.div_(whole)}

    def note(self, after: State, gradient: Params, hypers: Sequence[Hyper]) -> None:
        """Count this step among the later ones; those before it come next."""
        divisions = self._rule.divisions(hypers)
        for ((group, _), names), flat in zip(self._alike.items(), self._flat, strict=True):
            if (division := divisions[group]) is None:
                continue
            moved = gradient if division.mean is None else after[division.mean]
            given = {**flat, "square": _joined(after[division.square], names), "moved": _joined(moved, names)}
            cut = [values.split(BLOCK) for values in given.values()]
            for block in zip(*cut, strict=True):
                _count(dict(zip(given, block, strict=True)), division)

    def packed(self) -> dict[str, Tensor]:
        """Return what is carried, by name."""
        return {f"{part}/{name}": t for part, tensors in self._held.items() for name, t in tensors.items()}

    def unpack(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what an earlier process carried."""
        for part, held in self._held.items():
            for name, values in held.items():
                values.copy_(saved[f"{part}/{name}"])

    def divisions(self, hypers: Sequence[Hyper]) -> dict[str, Division]:
        """Return how a step divides, by the names of the parameters for which it does."""
        divisions = self._rule.divisions(hypers)
        by_name = ((name, divisions[group]) for name, group in self._rule.groups.items())
        return {name: division for name, division in by_name if division is not None}


def _joined(params: Params, names: Sequence[str]) -> Tensor:
    """Copy parameters into one vector."""
    return torch.cat([params[name].flatten() for name in names])


def _count(block: Params, division: Division) -> None:
    """Add a step to the means over later steps, for some coordinates."""
    least = max((division.eps / 100) ** 2, SMALLEST)
    square = block["square"].double().clamp_min_(least)
    root = square.pow(-0.5).reciprocal_()
    whole = root + division.eps
    size, rate = division.size / whole, (root * whole).reciprocal_()  # ψ, −2ψ'/ψ
    if division.mean is not None:
        _mix(block["mean_weight"], block["mean_rate"], size, rate, (division.mean_keeps, division.square_keeps))
    weight = block["moved"].abs().double() * size * rate
    bend = rate.mul(2 / 3).add_(square.reciprocal_(), alpha=1 / 3)  # −⅔ψ''/ψ'
    _mix(block["square_weight"], block["square_rate"], weight, bend, (division.square_keeps, division.square_keeps))


def _mix(weights: Tensor, rates: Tensor, weight: Tensor, rate: Tensor, keeps: tuple[float, float]) -> None:
    """Add a step to a mean over later steps, and turn it into the mean as the previous step sees it."""
    both = weight + weights
    mean = torch.addcmul(weights.double() * rates, weight, rate).div_(both.clamp_min(SMALLEST))
    weights.copy_(both.mul_(keeps[0]))
    rates.copy_(mean.mul_(keeps[1]).clamp_max_(1 / SMALLEST))


def _grown(square: Tensor, rate: Tensor, share: float = 1.0) -> Tensor:
    """Compute 1 + Δv/w for every row, or a share of it."""
    return torch.addcmul(rate.new_full((), share), square, rate * share).clamp_min_(FLOOR * share)
