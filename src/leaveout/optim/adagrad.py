"""Adagrad."""

from __future__ import annotations

import torch
from torch import Tensor

from leaveout._util.trees import PARAM
from leaveout.optim.definition import Definition, Division, Slots, Values, descent, sqrt


class Adagrad(Definition):
    """``torch.optim.Adagrad``."""

    name = "Adagrad"
    torch_class = torch.optim.Adagrad
    hypers = ("lr", "lr_decay", "eps", "weight_decay", "step")
    slots = (PARAM, "sum")

    def step(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute v ← v + d²,  θ ← θ − α/(1 + (t−1)η) · d/(√v + ε)  with d = g + λθ and learning rate decay η."""
        param, gradient = slots[PARAM], descent(gradient, hyper)
        if hyper["weight_decay"] != 0:
            gradient = gradient.add(param, alpha=hyper["weight_decay"])
        rate = hyper["lr"] / (1 + (hyper["step"] - 1) * hyper["lr_decay"])
        total = slots["sum"].addcmul(gradient, gradient, value=1)
        return {PARAM: param.addcdiv(gradient, sqrt(total).add(hyper["eps"]), value=-rate), "sum": total}

    def division(self, hyper: Values) -> Division:
        """Divide the gradient by √v, which forgets nothing."""
        rate = hyper["lr"] / (1 + (hyper["step"] - 1) * hyper["lr_decay"])
        return Division(None, "sum", 0.0, 1.0, rate, hyper["eps"])


OPTIMIZER = Adagrad()
