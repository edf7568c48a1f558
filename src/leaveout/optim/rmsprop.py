"""RMSprop, plain and centred, with momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from leaveout._util.trees import PARAM
from leaveout.optim.definition import Definition, Division, Slots, Values, descent, sqrt


class RMSprop(Definition):
    """``torch.optim.RMSprop``."""

    name = "RMSprop"
    torch_class = torch.optim.RMSprop
    hypers = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "step")
    slots = (PARAM, "square_avg")
    optional = (("momentum_buffer", "momentum"), ("grad_avg", "centered"))

    def step(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute v ← αv + (1−α)d²,  b ← μb + d/(√v + ε),  θ ← θ − lr·b  with d = g + λθ.

        If centred, √(v − ḡ²) takes the place of √v.
        """
        param, gradient = slots[PARAM], descent(gradient, hyper)
        if hyper["weight_decay"] != 0:
            gradient = gradient.add(param, alpha=hyper["weight_decay"])
        share = 1 - hyper["alpha"]
        new = {**slots, "square_avg": slots["square_avg"].mul(hyper["alpha"]).addcmul(gradient, gradient, value=share)}
        square = new["square_avg"]
        if hyper["centered"]:
            mean = new["grad_avg"] = slots["grad_avg"].lerp(gradient, share)
            square = square.addcmul(mean, mean, value=-1)
        average = sqrt(square).add(hyper["eps"])
        if hyper["momentum"] > 0:
            buffer = new["momentum_buffer"] = slots["momentum_buffer"].mul(hyper["momentum"]).addcdiv(gradient, average)
            return {**new, PARAM: param.add(buffer, alpha=-hyper["lr"])}
        return {**new, PARAM: param.addcdiv(gradient, average, value=-hyper["lr"])}

    def division(self, hyper: Values) -> Division | None:
        """Divide the gradient by √v; if centred, the divisor is not the root of one slot."""
        if hyper["centered"]:
            return None
        return Division(None, "square_avg", 0.0, hyper["alpha"], hyper["lr"], hyper["eps"])


OPTIMIZER = RMSprop()
