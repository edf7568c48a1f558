"""NAdam: Adam with Nesterov momentum, whose coefficient grows with the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leaveout._util.trees import PARAM
from leaveout.optim.definition import Definition, Division, Group, Hyper, Slots, Values, counter, descent, sqrt


class NAdam(Definition):
    """``torch.optim.NAdam``. ``mu_product`` is μ₁·…·μ_t as torch rounds it; it does not depend on any gradient."""

    name = "NAdam"
    torch_class = torch.optim.NAdam
    hypers = (
        "lr", "beta1", "beta2", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "step", "mu_product",
    )  # fmt: skip
    counters = ("step", "mu_product")
    slots = (PARAM, "exp_avg", "exp_avg_sq")

    def step(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute θ ← θ − α ((1−μ_t)/(1−Πμ) d + μ_{t+1}/(1−μ_{t+1}Πμ) m) / (√v̂ + ε)  with Adam's m, v̂ and d."""
        param, gradient, rate, t = slots[PARAM], descent(gradient, hyper), hyper["lr"], hyper["step"]
        if hyper["weight_decay"] != 0 and hyper["decoupled_weight_decay"]:
            param = param.mul(1 - rate * hyper["weight_decay"])
        elif hyper["weight_decay"] != 0:
            gradient = gradient.add(param, alpha=hyper["weight_decay"])
        mu, following = (coefficient(t + later, hyper["beta1"], hyper["momentum_decay"]) for later in (0, 1))
        product = hyper["mu_product"]
        mean = slots["exp_avg"].lerp(gradient, 1 - hyper["beta1"])
        square = slots["exp_avg_sq"].mul(hyper["beta2"]).addcmul(gradient, gradient, value=1 - hyper["beta2"])
        denominator = sqrt(square.div(1 - hyper["beta2"] ** t)).add(hyper["eps"])
        param = param.addcdiv(gradient, denominator, value=-rate * (1.0 - mu) / (1.0 - product))
        param = param.addcdiv(mean, denominator, value=(-rate * following) / (1.0 - product * following))
        return {PARAM: param, "exp_avg": mean, "exp_avg_sq": square}

    def division(self, hyper: Values) -> Division:
        """Divide m by √v̂; the gradient's own term in the step is ignored."""
        following = coefficient(hyper["step"] + 1, hyper["beta1"], hyper["momentum_decay"])
        correction = (1 - hyper["beta2"] ** hyper["step"]) ** 0.5
        size = hyper["lr"] * following / (1.0 - hyper["mu_product"] * following) * correction
        return Division("exp_avg", "exp_avg_sq", hyper["beta1"], hyper["beta2"], size, hyper["eps"] * correction)

    def coupled_decay(self, hyper: Hyper) -> float:
        """Return all of it or nothing, depending on the group."""
        return 0.0 if hyper["decoupled_weight_decay"] else hyper["weight_decay"]

    def counted(self, group: Group, state: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the step, and the product including its coefficient."""
        (counted,) = super().counted(group, state)
        step = counter(counted, {}, torch.zeros(())) if group.get("capturable") else counted
        mu = coefficient(step, group["betas"][0], group["momentum_decay"])
        return counted, float(self._product(state) * mu)

    def restored(self, held: Slots, hyper: Hyper, group: Group, param: Tensor) -> dict[str, Any]:
        """Return the same as for Adam, and the product."""
        counted = {key: counter(hyper[key], group, param) for key in self.counters}
        return {**counted, **held}

    @staticmethod
    def _product(state: Mapping[str, Any]) -> Tensor:
        if "mu_product" in state:
            return state["mu_product"].detach().cpu()
        return counter(1.0, {}, torch.zeros(()))


def coefficient(step: Any, beta: Any, decay: Any) -> Any:
    """Compute μ_t = β₁ (1 − 0.5 · 0.96^(tψ))."""
    return beta * (1.0 - 0.5 * (0.96 ** (step * decay)))


OPTIMIZER = NAdam()
