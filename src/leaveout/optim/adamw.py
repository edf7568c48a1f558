"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leaveout._util.trees import PARAM
from leaveout.optim.adam import Adam, by_kernel, decoupled, direction, jumped, pulled, update, update_
from leaveout.optim.definition import Definition, Group, Hyper, Slots, Values, descent, is_plain


class AdamW(Adam):
    """``torch.optim.AdamW``, and ``Adam`` with ``decoupled_weight_decay=True``."""

    name = "AdamW"
    torch_class = torch.optim.AdamW

    def step(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute θ ← (1 − αλ)θ first, then Adam's step with d = g."""
        if hyper["weight_decay"] != 0:
            slots = {**slots, PARAM: slots[PARAM].mul(1 - hyper["lr"] * hyper["weight_decay"])}
        return update(slots, descent(gradient, hyper), hyper)

    def step_(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Take the step in place."""
        if hyper["weight_decay"] != 0:
            slots[PARAM].mul_(1 - hyper["lr"] * hyper["weight_decay"])
        return update_(slots, gradient.neg_() if hyper.get("maximize") else gradient, hyper)

    def fused(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots | None:
        """Take the step with torch's fused kernel, on copies."""
        return by_kernel(torch._fused_adamw_, slots, gradient, hyper)

    def pulled(self, slots: Slots, gradient: Tensor, vector: Slots, hyper: Values) -> tuple[Slots, Tensor] | None:
        """Pull u back as for Adam with d = g; θ gets (1 − αλ)u_θ."""
        if hyper.get("amsgrad"):
            return None
        old, along = pulled(slots, descent(gradient, hyper), vector, hyper)
        if hyper["weight_decay"] != 0:
            old[PARAM] = vector[PARAM].mul(1 - hyper["lr"] * hyper["weight_decay"])
        return old, descent(along, hyper)

    def jumped(self, slots: Slots, after: Slots, gradient: Tensor, leaving: Tensor, hyper: Values) -> Slots:
        """Compute Adam's jump along d = g."""
        if hyper.get("amsgrad"):
            return Definition.jumped(self, slots, after, gradient, leaving, hyper)
        return jumped(slots, after, descent(gradient, hyper), descent(leaving, hyper), hyper)

    def consumed(self, slots: Slots, after: Slots, hyper: Values) -> Tensor | None:
        """Compute (m' − β₁m)/(1 − β₁)."""
        return descent(direction(slots, after, hyper), hyper)

    def describes(self, optimizer: object) -> bool:
        """Say whether this is an AdamW, or an Adam whose groups all have decoupled weight decay."""
        return is_plain(optimizer, torch.optim.AdamW) or (
            is_plain(optimizer, torch.optim.Adam) and decoupled(optimizer)
        )

    def problems(self, groups: Sequence[Group]) -> list[str]:  # noqa: ARG002
        """Return nothing: AdamW has no problems of its own."""
        return []

    def coupled_decay(self, hyper: Hyper) -> float:  # noqa: ARG002
        """Return 0: all weight decay is decoupled."""
        return 0.0


OPTIMIZER = AdamW()
