"""Adafactor: the second moment of a matrix from the means of its rows and columns; steps relative to the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leaveout._util.trees import PARAM
from leaveout.optim.definition import Definition, Group, Hyper, Slots, Values, counter, descent


class Adafactor(Definition):
    """``torch.optim.Adafactor``: ``row_var`` and ``col_var`` for matrices, ``variance`` for vectors."""

    name = "Adafactor"
    torch_class = getattr(torch.optim, "Adafactor", None)
    hypers = ("lr", "beta2_decay", "eps1", "eps2", "d", "weight_decay", "step")
    slots = (PARAM, "row_var", "col_var", "variance")
    stacking = "vmap"

    def step(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute θ ← (1 − lr·λ)θ − α·u/max(1, RMS(u)/d)  with u = g/√v and α = max(ε₂, RMS(θ))·min(lr, 1/√t).

        For a vector, v ← v + t^τ(g² − v); for a matrix, v = r·c/mean(r), with r and c averaged in the same way over
        its rows and columns.
        """
        param, gradient, rate, t = slots[PARAM], descent(gradient, hyper), hyper["lr"], hyper["step"]
        share, relative = t ** hyper["beta2_decay"], min(rate, 1 / t**0.5)
        size = _rms(param).clamp(min=hyper["eps2"])
        alpha = size.to(relative.dtype) * relative if isinstance(relative, Tensor) else size * relative
        if hyper["weight_decay"] != 0:
            param = param.mul(1 - rate * hyper["weight_decay"])
        new = dict(slots)
        if gradient.dim() > 1:
            row = new["row_var"] = slots["row_var"].lerp(_mean_square(gradient, -1), share)
            column = new["col_var"] = slots["col_var"].lerp(_mean_square(gradient, -2), share)
            variance = (row @ column).div(row.mean(dim=-2, keepdim=True).clamp(min=hyper["eps1"]))
        else:
            variance = new["variance"] = slots["variance"].lerp(gradient * gradient, share)
        update = variance.clamp(min=hyper["eps1"] * hyper["eps1"]).rsqrt().mul(gradient)
        clipped = _rms(update, hyper["d"]).clamp(min=1.0).to(alpha.dtype)
        return {**new, PARAM: torch.addcmul(param, update, (-alpha / clipped).to(param.dtype))}

    def shape(self, slot: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one column, of one row or of the parameter; slots it does not use are empty."""
        if slot == PARAM or (slot == "variance" and len(shape) < 2):
            return tuple(shape)
        if slot == "variance" or len(shape) < 2:
            return (0,)
        return (*shape[:-1], 1) if slot == "row_var" else (*shape[:-2], 1, shape[-1])

    def coupled_decay(self, hyper: Hyper) -> float:  # noqa: ARG002
        """Return 0: all weight decay is decoupled."""
        return 0.0

    def settings(self, group: Group, params: Sequence[Tensor]) -> dict[str, Any]:
        """Return both eps as numbers; if the first is not given, torch takes it from the first parameter's dtype."""
        eps1, eps2 = group["eps"]
        if eps1 is None and params:
            eps1 = torch.finfo(params[0].dtype).eps
        return super().settings({**group, "eps1": eps1 or 0.0, "eps2": eps2}, params)

    def restored(self, held: Slots, hyper: Hyper, group: Group, param: Tensor) -> dict[str, Any]:
        """Return only the slots that the parameter uses."""
        used = {slot: tensor for slot, tensor in held.items() if tensor.shape == self.shape(slot, param.shape) != (0,)}
        return {"step": counter(hyper["step"], group, param), **used}


def _mean_square(gradient: Tensor, dim: int) -> Tensor:
    """Compute the mean of squares along a dimension as torch does: from the norm, whose derivative at 0 is 0."""
    return torch.norm(gradient, dim=dim, keepdim=True).square().div(gradient.size(dim))


def _rms(tensor: Tensor, unit: float = 1.0) -> Tensor:
    """Compute √(mean of squares) in multiples of ``unit``, in float64, as torch does with Python numbers."""
    return tensor.norm(2).double() / (tensor.numel() ** 0.5 * unit)


OPTIMIZER = Adafactor()
