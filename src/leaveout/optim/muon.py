"""Muon: momentum orthogonalised by a few Newton-Schulz iterations, for matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from leaveout._util.trees import PARAM
from leaveout.optim.definition import Definition, Group, Hyper, Slots, Values

ADJUST = (None, "original", "match_rms_adamw", "spectral_unclamped")


class Muon(Definition):
    """``torch.optim.Muon``. ``adjust`` is the index of ``adjust_lr_fn`` in ``ADJUST``.

    torch iterates in bfloat16, and so do the recorded step and every replay, one model after the other, since another
    order of summation would round differently. What is differentiated is the same iteration without that rounding,
    since the derivative of the rounding itself is zero almost everywhere.
    """

    name = "Muon"
    torch_class = getattr(torch.optim, "Muon", None)
    hypers = ("lr", "weight_decay", "momentum", "nesterov", "ns_a", "ns_b", "ns_c", "eps", "ns_steps", "adjust")
    counters = ()
    options = ()
    slots = (PARAM, "momentum_buffer")
    stacking = "loop"

    def step(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute m ← μm + (1−μ)g,  θ ← (1 − αλ)θ − α'·NS(m)  (Nesterov: NS(μm + (1−μ)g)), NS in bfloat16."""
        return self._step(slots, gradient, hyper, torch.bfloat16)

    def smooth(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute the step without rounding to bfloat16."""
        return self._step(slots, gradient, hyper, gradient.dtype)

    def _step(self, slots: Slots, gradient: Tensor, hyper: Values, dtype: torch.dtype) -> Slots:
        param, rate = slots[PARAM], hyper["lr"]
        buffer = slots["momentum_buffer"].lerp(gradient, 1 - hyper["momentum"])
        direction = gradient.lerp(buffer, hyper["momentum"]) if hyper["nesterov"] else buffer
        direction = orthogonal(direction.to(dtype), hyper)
        param = param.mul(1 - rate * hyper["weight_decay"])
        return {
            PARAM: param.add(direction.to(param.dtype), alpha=-rate * _ratio(param.shape, hyper)),
            "momentum_buffer": buffer,
        }

    def coupled_decay(self, hyper: Hyper) -> float:  # noqa: ARG002
        """Return 0: all weight decay is decoupled."""
        return 0.0

    def settings(self, group: Group, params: Sequence[Tensor]) -> dict[str, Any]:
        """Return the settings with the three coefficients and the adjustment as numbers."""
        a, b, c = group["ns_coefficients"]
        adjust = ADJUST.index(group["adjust_lr_fn"])
        return super().settings({**group, "ns_a": a, "ns_b": b, "ns_c": c, "adjust": adjust}, params)

    def counted(self, group: Group, state: Mapping[str, Any]) -> tuple[float, ...]:  # noqa: ARG002
        """Return nothing: Muon has no counters."""
        return ()

    def restored(self, held: Slots, hyper: Hyper, group: Group, param: Tensor) -> dict[str, Any]:  # noqa: ARG002
        """Return the momentum buffer."""
        return dict(held)


def orthogonal(matrix: Tensor, hyper: Values) -> Tensor:
    """Compute NS(G): X = G/‖G‖, then k times X ← aX + (bA + cA²)X with A = XXᵀ; close to UVᵀ for G = USVᵀ."""
    a, b, c = hyper["ns_a"], hyper["ns_b"], hyper["ns_c"]
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=hyper["eps"])
    for _ in range(int(hyper["ns_steps"])):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _ratio(shape: Sequence[int], hyper: Values) -> float:
    """Return the factor on the learning rate for a matrix of this shape."""
    rows, columns = shape
    adjust = ADJUST[int(hyper["adjust"])]
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(rows / columns if adjust == "spectral_unclamped" else max(1, rows / columns))


OPTIMIZER = Muon()
