"""RAdam: Adam whose second moment is used, and rectified, once it can be trusted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leaveout._util.trees import PARAM
from leaveout.optim.definition import Definition, Division, Hyper, Slots, Values, descent, sqrt

TRUSTED = 5.0
"""Above this length of the averaged sequence the second moment is used."""


class RAdam(Definition):
    """``torch.optim.RAdam``."""

    name = "RAdam"
    torch_class = torch.optim.RAdam
    hypers = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay", "step")
    slots = (PARAM, "exp_avg", "exp_avg_sq")

    def step(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute θ ← θ − α r_t m̂ √(1−β₂ᵗ)/(√v + ε) with Adam's m, v and d once ρ_t > 5, before that θ ← θ − α m̂.

        ρ_t depends on t alone.
        """
        param, gradient, rate, t = slots[PARAM], descent(gradient, hyper), hyper["lr"], hyper["step"]
        beta2 = hyper["beta2"]
        if hyper["weight_decay"] != 0 and hyper["decoupled_weight_decay"]:
            param = param.mul(1 - rate * hyper["weight_decay"])
        elif hyper["weight_decay"] != 0:
            gradient = gradient.add(param, alpha=hyper["weight_decay"])
        mean = slots["exp_avg"].lerp(gradient, 1 - hyper["beta1"])
        square = slots["exp_avg_sq"].mul(beta2).addcmul(gradient, gradient, value=1 - beta2)
        moved = mean / (1 - hyper["beta1"] ** t) * rate
        correction = 1 - beta2**t
        length, longest = lengths(beta2, t)
        if length > TRUSTED:
            moved = moved * (correction**0.5 / sqrt(square).add(hyper["eps"])) * rectification(length, longest)
        return {PARAM: param.add(moved, alpha=-1.0), "exp_avg": mean, "exp_avg_sq": square}

    def division(self, hyper: Values) -> Division:
        """Divide m by √v, with size zero as long as the second moment is not used."""
        t, beta2 = hyper["step"], hyper["beta2"]
        length, longest = lengths(beta2, t)
        size = 0.0
        if length > TRUSTED:
            rate = hyper["lr"] / (1 - hyper["beta1"] ** t)
            size = rate * (1 - beta2**t) ** 0.5 * rectification(length, longest)
        return Division("exp_avg", "exp_avg_sq", hyper["beta1"], beta2, size, hyper["eps"])

    def coupled_decay(self, hyper: Hyper) -> float:
        """Return all of it or nothing, depending on the group."""
        return 0.0 if hyper["decoupled_weight_decay"] else hyper["weight_decay"]


def lengths(beta2: Any, t: Any) -> tuple[Any, Any]:
    """Compute ρ_t, the length of the averaged sequence, and ρ_∞, its limit."""
    longest = 2 / (1 - beta2) - 1
    return longest - 2 * t * (beta2**t) / (1 - beta2**t), longest


def rectification(length: Any, longest: float) -> Any:
    """Compute r_t = √((ρ_t−4)(ρ_t−2)ρ_∞ / ((ρ_∞−4)(ρ_∞−2)ρ_t))."""
    return ((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)) ** 0.5


OPTIMIZER = RAdam()
