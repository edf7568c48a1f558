"""Adam, with coupled weight decay and, as an option, the largest second moment so far (AMSGrad)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from leaveout._util.trees import PARAM
from leaveout.optim.definition import Definition, Division, Group, Slots, Values, descent, is_plain, larger, sqrt


class Adam(Definition):
    """``torch.optim.Adam``. ``step`` is the t of the bias correction, counted from 1."""

    name = "Adam"
    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.Adam
    hypers = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")
    options = ("amsgrad", "maximize")
    slots = (PARAM, "exp_avg", "exp_avg_sq")
    optional = (("max_exp_avg_sq", "amsgrad"),)
    adam_moments = True

    def step(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute m ← β₁m + (1−β₁)d,  v ← β₂v + (1−β₂)d²,  θ ← θ − α m̂ / (√v̂ + ε)  with d = g + λθ."""
        gradient = descent(gradient, hyper)
        if hyper["weight_decay"] != 0:
            gradient = gradient.add(slots[PARAM], alpha=hyper["weight_decay"])
        return update(slots, gradient, hyper)

    def step_(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Take the step in place: for all but small models, memory traffic takes most of the time."""
        if hyper.get("maximize"):
            gradient.neg_()
        if hyper["weight_decay"] != 0:
            gradient.add_(slots[PARAM], alpha=hyper["weight_decay"])
        return update_(slots, gradient, hyper)

    def fused(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots | None:
        """Take the step with torch's fused kernel, on copies."""
        return by_kernel(torch._fused_adam_, slots, gradient, hyper)

    def pulled(self, slots: Slots, gradient: Tensor, vector: Slots, hyper: Values) -> tuple[Slots, Tensor] | None:
        """Pull u back; since d includes λθ, what reaches d also reaches θ."""
        if hyper.get("amsgrad"):
            return None
        used, decay = descent(gradient, hyper), hyper["weight_decay"]
        if decay != 0:
            used = used.add(slots[PARAM], alpha=decay)
        old, along = pulled(slots, used, vector, hyper)
        if decay != 0:
            old[PARAM] = vector[PARAM].add(along, alpha=decay)
        return old, descent(along, hyper)

    def jumped(self, slots: Slots, after: Slots, gradient: Tensor, leaving: Tensor, hyper: Values) -> Slots:
        """Compute the jump along d = g + λθ; ℓ is subtracted from d just as from g."""
        if hyper.get("amsgrad"):
            return super().jumped(slots, after, gradient, leaving, hyper)
        used = descent(gradient, hyper).add(slots[PARAM], alpha=hyper["weight_decay"])
        return jumped(slots, after, used, descent(leaving, hyper), hyper)

    def consumed(self, slots: Slots, after: Slots, hyper: Values) -> Tensor | None:
        """Compute (m' − β₁m)/(1 − β₁) − λθ."""
        return descent(direction(slots, after, hyper).sub_(slots[PARAM], alpha=hyper["weight_decay"]), hyper)

    def division(self, hyper: Values) -> Division:
        """Divide m by √v; for AMSGrad by its largest value so far, which forgets nothing."""
        rate, correction = hyper["lr"] / (1 - hyper["beta1"] ** hyper["step"]), root_correction(hyper)
        square, keeps = ("max_exp_avg_sq", 1.0) if hyper.get("amsgrad") else ("exp_avg_sq", hyper["beta2"])
        return Division("exp_avg", square, hyper["beta1"], keeps, rate * correction, hyper["eps"] * correction)

    def describes(self, optimizer: object) -> bool:
        """Say whether this is an Adam; if all its groups have decoupled weight decay, it is an AdamW instead."""
        return is_plain(optimizer, torch.optim.Adam) and not decoupled(optimizer)

    def problems(self, groups: Sequence[Group]) -> list[str]:
        """Report a mix of Adam groups and AdamW groups, which are two optimizers."""
        if any(group.get("decoupled_weight_decay") for group in groups):
            return ["some of its groups have decoupled_weight_decay=True and some not; set it alike for all"]
        return []


def decoupled(optimizer: object) -> bool:
    """Say whether an Adam is torch's AdamW, which is its Adam with this flag."""
    return isinstance(optimizer, torch.optim.Optimizer) and all(
        group.get("decoupled_weight_decay", False) for group in optimizer.param_groups
    )


def root_correction(hyper: Values) -> Any:
    """Compute √(1 − β₂ᵗ), for √v̂ = √v/√(1 − β₂ᵗ)."""
    return (1 - hyper["beta2"] ** hyper["step"]) ** 0.5


def update(slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
    """Update both moments with d, and the parameter with both moments."""
    mean = slots["exp_avg"].lerp(gradient, 1 - hyper["beta1"])
    square = slots["exp_avg_sq"].mul(hyper["beta2"]).addcmul(gradient, gradient, value=1 - hyper["beta2"])
    step_size = hyper["lr"] / (1 - hyper["beta1"] ** hyper["step"])
    correction = root_correction(hyper)
    new = {**slots, "exp_avg": mean, "exp_avg_sq": square}
    if hyper.get("amsgrad"):
        new["max_exp_avg_sq"] = larger(slots["max_exp_avg_sq"], square)
    denominator = (sqrt(new["max_exp_avg_sq"] if hyper.get("amsgrad") else square) / correction).add(hyper["eps"])
    return {**new, PARAM: slots[PARAM].addcdiv(mean, denominator, value=-step_size)}


def update_(slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
    """Do what ``update`` does, to the last bit, but write into the slots."""
    mean = slots["exp_avg"].lerp_(gradient, 1 - hyper["beta1"])
    square = slots["exp_avg_sq"].mul_(hyper["beta2"]).addcmul_(gradient, gradient, value=1 - hyper["beta2"])
    if hyper.get("amsgrad"):
        square = slots["max_exp_avg_sq"].copy_(larger(slots["max_exp_avg_sq"], square))
    step_size = hyper["lr"] / (1 - hyper["beta1"] ** hyper["step"])
    denominator = square.sqrt().div_(root_correction(hyper)).add_(hyper["eps"])
    slots[PARAM].addcdiv_(mean, denominator, value=-step_size)
    return slots


def by_kernel(kernel: Any, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
    """Take a step with one of torch's fused kernels, which write into their arguments."""
    new = {slot: tensor.contiguous().clone() for slot, tensor in slots.items()}
    largest = [new["max_exp_avg_sq"]] if hyper.get("amsgrad") else []
    count = torch.tensor(hyper["step"], dtype=torch.float32, device=gradient.device)
    settings = {name: hyper[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
    flags = {name: bool(hyper.get(name)) for name in ("amsgrad", "maximize")}
    moments = [new["exp_avg"]], [new["exp_avg_sq"]], largest
    kernel([new[PARAM]], [gradient.contiguous()], *moments, [count], **settings, **flags)
    return new


def pulled(slots: Slots, gradient: Tensor, vector: Slots, hyper: Values) -> tuple[Slots, Tensor]:
    """Pull u back through ``update``, to the old slots (u_θ unchanged) and to d.

    With c² = 1 − β₂ᵗ, D = √v' + cε, s the step size and q = u_θ/D, a = u_m − s·c·q reaches m' and
    b = u_v + s·c·q·m'/(2D·√v') reaches v' (u_v alone where v' = 0). The results are β₁a for m, β₂b for v and
    (1 − β₁)a + 2(1 − β₂)d·b for d.
    """
    mean = slots["exp_avg"].lerp(gradient, 1 - hyper["beta1"])
    square = slots["exp_avg_sq"].mul(hyper["beta2"]).addcmul_(gradient, gradient, value=1 - hyper["beta2"])
    correction = float(root_correction(hyper))
    size = float(hyper["lr"] / (1 - hyper["beta1"] ** hyper["step"])) * correction
    root = square.sqrt_()
    denominator = root + hyper["eps"] * correction
    share = vector[PARAM] / denominator
    along = torch.sub(vector["exp_avg"], share, alpha=size)
    # The root is zero where the gradient has been zero so far; its derivative is taken to be zero there.
    bent = mean.mul_(share).div_(denominator).div_(root).masked_fill_(root == 0, 0.0)
    bent = torch.add(vector["exp_avg_sq"], bent, alpha=size / 2)
    into = torch.addcmul(along * (1 - hyper["beta1"]), gradient, bent, value=2 * (1 - hyper["beta2"]))
    # AMSGrad's largest moment, if the run has one, stays as it is in a step without AMSGrad.
    return {**vector, "exp_avg": along.mul_(hyper["beta1"]), "exp_avg_sq": bent.mul_(hyper["beta2"])}, into


def jumped(slots: Slots, after: Slots, used: Tensor, leaving: Tensor, hyper: Values) -> Slots:
    """Compute the slots after an ``update`` with d − ℓ, for each row ℓ of ``leaving``, minus those after one with d.

    θ's old value and its decay cancel. With m' and v' after the step, m″ and v″ for a row, and s the step size,

        Δm = −(1 − β₁)ℓ,    Δv = v″ − v',    Δθ = −s·c·(m″/(√v″ + cε) − m'/(√v' + cε)),    c² = 1 − β₂ᵗ

    This takes few passes over the rows, and the result is zero where ℓ is. √x is taken as 1/x^(−1/2), which PyTorch
    computes faster than its square root on AMD's processors.
    """
    correction, mean_share = float(root_correction(hyper)), 1 - float(hyper["beta1"])
    size = float(hyper["lr"] / (1 - hyper["beta1"] ** hyper["step"])) * correction
    eps = float(hyper["eps"]) * correction
    rest = used - leaving
    # From d − ℓ, as in the step: moments that cancel have to come out as small as they do there.
    square = torch.addcmul(slots["exp_avg_sq"] * hyper["beta2"], rest, rest, value=1 - hyper["beta2"])
    kept = slots["exp_avg"] * (-size * float(hyper["beta1"]))
    moved, stepped = (torch.add(kept, one, alpha=-size * mean_share) for one in (rest, used))
    root = torch.pow(square, -0.5, out=rest).reciprocal_().add_(eps)
    stepped.div_(after["exp_avg_sq"].pow(-0.5).reciprocal_().add_(eps))
    moved = torch.addcdiv(stepped.neg_(), moved, root, out=moved)
    unchanged = {slot: torch.zeros_like(leaving) for slot in slots if slot == "max_exp_avg_sq"}
    return {
        **unchanged,
        PARAM: moved,
        "exp_avg": torch.mul(leaving, -mean_share, out=root),
        "exp_avg_sq": square.sub_(after["exp_avg_sq"]),
    }


def direction(slots: Slots, after: Slots, hyper: Values) -> Tensor:
    """Compute the d that m was updated with."""
    return after["exp_avg"].sub(slots["exp_avg"], alpha=hyper["beta1"]).div_(1 - hyper["beta1"])


OPTIMIZER = Adam()
