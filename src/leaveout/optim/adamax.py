"""Adamax: Adam with the largest gradient so far in place of the second moment."""

from __future__ import annotations

import torch
from torch import Tensor

from leaveout._util.trees import PARAM
from leaveout.optim.definition import Definition, Slots, Values, descent, larger


class Adamax(Definition):
    """``torch.optim.Adamax``."""

    name = "Adamax"
    torch_class = torch.optim.Adamax
    hypers = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")
    slots = (PARAM, "exp_avg", "exp_inf")

    def step(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute m ← β₁m + (1−β₁)d,  u ← max(β₂u, |d| + ε),  θ ← θ − α/(1 − β₁ᵗ) · m/u  with d = g + λθ."""
        param, gradient = slots[PARAM], descent(gradient, hyper)
        if hyper["weight_decay"] != 0:
            gradient = gradient.add(param, alpha=hyper["weight_decay"])
        mean = slots["exp_avg"].lerp(gradient, 1 - hyper["beta1"])
        largest = larger(slots["exp_inf"].mul(hyper["beta2"]), gradient.abs().add(hyper["eps"]))
        rate = hyper["lr"] / (1 - hyper["beta1"] ** hyper["step"])
        return {PARAM: param.addcdiv(mean, largest, value=-rate), "exp_avg": mean, "exp_inf": largest}


OPTIMIZER = Adamax()
