"""SGD with momentum (also Nesterov), dampening and weight decay: the only linear step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leaveout._util.trees import PARAM
from leaveout.optim.definition import Definition, Group, Hyper, Slots, Values, descent


class SGD(Definition):
    """``torch.optim.SGD``. ``started`` says whether the momentum buffer existed before the step."""

    name = "SGD"
    torch_class = torch.optim.SGD
    hypers = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "started")
    counters = ("started",)
    optional = (("momentum_buffer", "momentum"),)
    linear = True

    def step(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute d = g + λθ;  m ← μm + (1−τ)d (first step: m ← d);  θ ← θ − α·m  (Nesterov: d + μm;  μ = 0: d).

        >>> hyper = {"lr": 0.25, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": 0, "started": 1}
        >>> SGD().step({"param": torch.tensor([1.0])}, torch.tensor([2.0]), hyper)
        {'param': tensor([0.5000])}
        """
        param, gradient = slots[PARAM], descent(gradient, hyper)
        if hyper["weight_decay"] != 0:
            gradient = gradient.add(param, alpha=hyper["weight_decay"])
        if hyper["momentum"] == 0:
            return {**slots, PARAM: param.add(gradient, alpha=-hyper["lr"])}
        if hyper["started"]:
            buffer = slots["momentum_buffer"].mul(hyper["momentum"]).add(gradient, alpha=1 - hyper["dampening"])
        else:
            buffer = gradient
        direction = gradient.add(buffer, alpha=hyper["momentum"]) if hyper["nesterov"] else buffer
        return {PARAM: param.add(direction, alpha=-hyper["lr"]), "momentum_buffer": buffer}

    def step_(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Take the step in place: for large stacks, memory traffic takes most of the time."""
        param = slots[PARAM]
        if hyper.get("maximize"):
            gradient.neg_()
        if hyper["weight_decay"] != 0:
            gradient.add_(param, alpha=hyper["weight_decay"])
        if hyper["momentum"] == 0:
            param.add_(gradient, alpha=-hyper["lr"])
            return slots
        buffer = slots["momentum_buffer"]
        if hyper["started"]:
            buffer.mul_(hyper["momentum"]).add_(gradient, alpha=1 - hyper["dampening"])
        else:
            buffer.copy_(gradient)
        direction = gradient.add_(buffer, alpha=hyper["momentum"]) if hyper["nesterov"] else buffer
        param.add_(direction, alpha=-hyper["lr"])
        return slots

    def transposed(self, vector: Slots, hyper: Values) -> tuple[Slots, Tensor]:
        """Pull a cotangent of the new slots back to the old slots and to g."""
        along = vector[PARAM].mul(-hyper["lr"])
        rest: Slots = {slot: tensor for slot, tensor in vector.items() if slot != PARAM}
        if hyper["momentum"] != 0:
            buffer = vector["momentum_buffer"].add(along, alpha=hyper["momentum"] if hyper["nesterov"] else 1)
            through = buffer.mul(1 - hyper["dampening"]) if hyper["started"] else buffer
            along = along.add(through) if hyper["nesterov"] else through
            rest["momentum_buffer"] = buffer.mul(hyper["momentum"] if hyper["started"] else 0)
        old = {PARAM: vector[PARAM].add(along, alpha=hyper["weight_decay"]), **rest}
        return old, descent(along, hyper)

    def counted(self, group: Group, state: Mapping[str, Any]) -> tuple[float, ...]:  # noqa: ARG002
        """Say whether the momentum buffer exists already."""
        return (float(state.get("momentum_buffer") is not None),)

    def restored(self, held: Slots, hyper: Hyper, group: Group, param: Tensor) -> dict[str, Any]:  # noqa: ARG002
        """Return the momentum buffer, if it exists by then."""
        return dict(held) if hyper["started"] or hyper["momentum"] else {}


OPTIMIZER = SGD()
