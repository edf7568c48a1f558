"""Gradient clipping before the optimizer's step, by norm or by value; it is differentiated as part of the step.

By norm, ``g ← g · min(1, c / (‖g‖_p + 10⁻⁶))`` over all parameters together, like
``torch.nn.utils.clip_grad_norm_``; by value, ``g ← min(max(g, −v), v)``, like ``clip_grad_value_``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leaveout._util.trees import Params
from leaveout.errors import InputError

FLOOR = 1e-6
"""What torch adds to the norm."""


@dataclass(frozen=True)
class Clip:
    """How gradients were clipped.

    Args:
        norm: the largest norm, or None.
        p: which norm: 2, 1, ``inf`` or any other.
        value: the largest absolute value of an entry, or None; applied before the norm if both are given.
    """

    norm: float | None = None
    p: float = 2.0
    value: float | None = None

    def __call__(self, gradient: Params) -> Params:
        """Return the clipped gradient of one model.

        >>> Clip(norm=1.0)({"w": torch.tensor([3.0, 4.0])})["w"]
        tensor([0.6000, 0.8000])
        """
        if self.value is not None:
            gradient = {name: tensor.clamp(-self.value, self.value) for name, tensor in gradient.items()}
        if self.norm is None:
            return gradient
        norms = torch.stack([_norm(tensor, self.p) for tensor in gradient.values()])
        factor = (self.norm / (_norm(norms, self.p) + FLOOR)).clamp(max=1.0)
        return {name: tensor * factor for name, tensor in gradient.items()}


def clip_of(norm: float | tuple[float, float] | None, value: float | None) -> Clip | None:
    """Check a task's clipping arguments and return the clipping they describe, or None.

    >>> clip_of((1.0, 1), None)
    Clip(norm=1.0, p=1.0, value=None)
    """
    if norm is None and value is None:
        return None
    largest, p = norm if isinstance(norm, tuple) else (norm, 2.0)
    for name, given in (("clip_norm", largest), ("clip_value", value)):
        if given is not None and not (isinstance(given, int | float) and given > 0):
            raise InputError(f"{name}={given!r} must be a positive number.", code="clip-out-of-range")
    if not (isinstance(p, int | float) and p > 0):
        raise InputError(
            f"clip_norm={norm!r} must be the largest norm, or that and the norm's p, such as (1.0, 2).",
            code="clip-out-of-range",
        )
    return Clip(None if largest is None else float(largest), float(p), None if value is None else float(value))


def _norm(tensor: Tensor, p: float) -> Tensor:
    """Compute ‖t‖_p, with derivative 0 at t = 0, where torch's norm has none."""
    zero = (tensor == 0).all()
    return torch.where(zero, 0.0, torch.linalg.vector_norm(torch.where(zero, 1.0, tensor), p))
