"""Adadelta."""

from __future__ import annotations

import torch
from torch import Tensor

from leaveout._util.trees import PARAM
from leaveout.optim.definition import Definition, Slots, Values, descent, sqrt


class Adadelta(Definition):
    """``torch.optim.Adadelta``."""

    name = "Adadelta"
    torch_class = torch.optim.Adadelta
    hypers = ("lr", "rho", "eps", "weight_decay", "step")
    slots = (PARAM, "square_avg", "acc_delta")

    def step(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute v ← ρv + (1−ρ)d²,  Δ = √(a + ε)/√(v + ε) · d,  a ← ρa + (1−ρ)Δ²,  θ ← θ − αΔ  with d = g + λθ."""
        param, gradient = slots[PARAM], descent(gradient, hyper)
        if hyper["weight_decay"] != 0:
            gradient = gradient.add(param, alpha=hyper["weight_decay"])
        rho, eps = hyper["rho"], hyper["eps"]
        square = slots["square_avg"].mul(rho).addcmul(gradient, gradient, value=1 - rho)
        change = sqrt(slots["acc_delta"].add(eps)).div(sqrt(square.add(eps))).mul(gradient)
        moved = slots["acc_delta"].mul(rho).addcmul(change, change, value=1 - rho)
        return {PARAM: param.add(change, alpha=-hyper["lr"]), "square_avg": square, "acc_delta": moved}


OPTIMIZER = Adadelta()
