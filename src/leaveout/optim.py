"""Optimizer steps as pure functions of (state, gradient, hyperparameters), and their derivatives.

Each step repeats ``torch.optim``'s arithmetic operation by operation, so that a replay follows the recorded run to
the last bit. All of them act elementwise: the same functions serve one model and a stack of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import jvp

from leaveout._util.trees import PARAM, Params, State, memory, pullback
from leaveout.errors import UnsupportedError

Hyper: TypeAlias = dict[str, float]
"""The hyperparameters of one parameter group at one step."""

Slots: TypeAlias = dict[str, Tensor]
"""One parameter's tensors by slot."""


def sgd(slots: Slots, gradient: Tensor, hyper: Hyper) -> Slots:
    """D = g + λθ;  m ← μm + (1−τ)d (m ← d at the first step);  θ ← θ − α·m  (Nesterov: d + μm;  μ = 0: d).

    >>> sgd({"param": torch.tensor([1.0])}, torch.tensor([2.0]),
    ...     {"lr": 0.25, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": 0, "started": 1})
    {'param': tensor([0.5000])}
    """
    param = slots[PARAM]
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


def sgd_(slots: Slots, gradient: Tensor, hyper: Hyper) -> Slots:
    """As ``sgd``, writing into the slots and the gradient: for large stacks, memory traffic is most of the time."""
    param = slots[PARAM]
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


def sgd_transposed(vector: Slots, hyper: Hyper) -> tuple[Slots, Tensor]:
    """The transposed derivative of ``sgd``: what a cotangent of the new slots is for the old ones, and for g."""
    along = vector[PARAM].mul(-hyper["lr"])
    rest: Slots = {slot: tensor for slot, tensor in vector.items() if slot != PARAM}
    if hyper["momentum"] != 0:
        buffer = vector["momentum_buffer"].add(along, alpha=hyper["momentum"] if hyper["nesterov"] else 1)
        through = buffer.mul(1 - hyper["dampening"]) if hyper["started"] else buffer
        along = along.add(through) if hyper["nesterov"] else through
        rest["momentum_buffer"] = buffer.mul(hyper["momentum"] if hyper["started"] else 0)
    return {PARAM: vector[PARAM].add(along, alpha=hyper["weight_decay"]), **rest}, along


def adam(slots: Slots, gradient: Tensor, hyper: Hyper) -> Slots:
    """M ← β₁m + (1−β₁)d,  v ← β₂v + (1−β₂)d²,  θ ← θ − α m̂ / (√v̂ + ε)  with d = g + λθ."""
    if hyper["weight_decay"] != 0:
        gradient = gradient.add(slots[PARAM], alpha=hyper["weight_decay"])
    return _adam_update(slots, gradient, hyper)


def adamw(slots: Slots, gradient: Tensor, hyper: Hyper) -> Slots:
    """Adam with the weight decay beside the gradient: θ ← (1 − αλ)θ first, and d = g."""
    if hyper["weight_decay"] != 0:
        slots = {**slots, PARAM: slots[PARAM].mul(1 - hyper["lr"] * hyper["weight_decay"])}
    return _adam_update(slots, gradient, hyper)


def _adam_update(slots: Slots, gradient: Tensor, hyper: Hyper) -> Slots:
    mean = slots["exp_avg"].lerp(gradient, 1 - hyper["beta1"])
    square = slots["exp_avg_sq"].mul(hyper["beta2"]).addcmul(gradient, gradient, value=1 - hyper["beta2"])
    step_size = hyper["lr"] / (1 - hyper["beta1"] ** hyper["step"])
    correction = math.sqrt(1 - hyper["beta2"] ** hyper["step"])
    denominator = (_sqrt(square) / correction).add(hyper["eps"])
    param = slots[PARAM].addcdiv(mean, denominator, value=-step_size)
    return {PARAM: param, "exp_avg": mean, "exp_avg_sq": square}


def _sqrt(square: Tensor) -> Tensor:
    """√v, with derivative 0 at v = 0: there the gradient has been 0 so far, and m/(√v + ε) has derivative m'/ε."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


_STEPS: dict[str, Callable[[Slots, Tensor, Hyper], Slots]] = {"SGD": sgd, "Adam": adam, "AdamW": adamw}

HYPERS: dict[str, tuple[str, ...]] = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "started"),
    "Adam": ("lr", "beta1", "beta2", "eps", "weight_decay", "step"),
    "AdamW": ("lr", "beta1", "beta2", "eps", "weight_decay", "step"),
}
"""What is recorded of each group at each step. ``started``: the momentum buffer exists already; ``step``: Adam's t."""


@dataclass(frozen=True)
class Rule:
    """Which optimizer it is, the parameter group of each parameter, and the slots of its state."""

    kind: str
    groups: dict[str, int]
    slots: tuple[str, ...]

    @property
    def linear(self) -> bool:
        """Whether the step is linear in (state, gradient) together, so that it is its own derivative."""
        return self.kind == "SGD"

    def restricted(self, names: Sequence[str]) -> Rule:
        """The same for some of the parameters."""
        return replace(self, groups={name: group for name, group in self.groups.items() if name in names})

    def step(self, state: State, gradient: Params, hypers: Sequence[Hyper]) -> State:
        """O(s, g): the state after one step, for one model or a stack of them."""
        function = _STEPS[self.kind]
        new: State = {slot: {} for slot in self.slots}
        for name, group in self.groups.items():
            slots = {slot: state[slot][name] for slot in self.slots}
            for slot, tensor in function(slots, gradient[name], hypers[group]).items():
                new[slot][name] = tensor
        return new

    def step_(self, state: State, gradient: Params, hypers: Sequence[Hyper]) -> State:
        """As ``step``; the state and the gradient are used up."""
        if not self.linear:
            return self.step(state, gradient, hypers)
        used = {memory(tensor) for params in state.values() for tensor in params.values()}
        for name, group in self.groups.items():
            # Two parameters whose gradients are equal may have been given one tensor, and one that the loss does not
            # use may have been given one zero for all rows.
            own = gradient[name].contiguous()
            own = own.clone() if memory(own) in used else own
            used.add(memory(own))
            sgd_({slot: state[slot][name] for slot in self.slots}, own, hypers[group])
        return state

    def tangent(self, at: tuple[State, Params], along: tuple[State, Params], hypers: Sequence[Hyper]) -> State:
        """∂O(s, g)·(ds, dg), for stacks of the same height."""
        if self.linear:
            return self.step(*along, hypers)
        # Forward mode refuses tensors that share memory along a dimension, as an expanded state does.
        state, gradient = at
        whole = {slot: {name: tensor.contiguous() for name, tensor in params.items()} for slot, params in state.items()}
        point = (whole, {name: tensor.contiguous() for name, tensor in gradient.items()})
        return jvp(lambda state, gradient: self.step(state, gradient, hypers), point, along)[1]

    def cotangent(self, at: tuple[State, Params], vector: State, hypers: Sequence[Hyper]) -> tuple[State, Params]:
        """∂O(s, g)ᵀ·u as its part for the state and its part for the gradient, for stacks of the same height."""
        if self.linear:
            return self._sgd_cotangent(vector, hypers)
        _, pull = pullback(lambda state, gradient: self.step(state, gradient, hypers), *at)
        state, gradient = pull(vector)
        return state, gradient

    def _sgd_cotangent(self, vector: State, hypers: Sequence[Hyper]) -> tuple[State, Params]:
        state: State = {slot: {} for slot in self.slots}
        gradient: Params = {}
        for name, group in self.groups.items():
            old, gradient[name] = sgd_transposed({slot: vector[slot][name] for slot in self.slots}, hypers[group])
            for slot, tensor in old.items():
                state[slot][name] = tensor
        return state, gradient


def rule_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Rule:
    """The rule of a ``torch.optim`` optimizer, or a refusal that lists every reason."""
    kind = type(optimizer).__name__
    decoupled = {group.get("decoupled_weight_decay") for group in optimizer.param_groups}
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise UnsupportedError(
            f"The optimizer {kind} cannot be replayed exactly: train with torch.optim.SGD, Adam or AdamW."
        )
    names = {id(param): name for name, param in model.named_parameters()}
    problems: list[str] = []
    groups: dict[str, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        problems += [
            f"parameter group {number} has {flag}=True; set {flag}=False"
            for flag in ("maximize", "amsgrad", "differentiable")
            if group.get(flag)
        ]
        strangers = [tuple(param.shape) for param in group["params"] if id(param) not in names]
        if strangers:
            problems.append(
                f"parameter group {number} holds {len(strangers)} tensors that are not parameters of the model (the "
                f"first has shape {strangers[0]}); build the optimizer from this model's own parameters"
            )
        known = [param for param in group["params"] if id(param) in names and param.requires_grad]
        groups |= {names[id(param)]: number for param in known}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and n not in groups]
    if missing and groups:
        problems.append(
            f"{', '.join(map(repr, missing))} need gradients but are in no group; give them to the optimizer or freeze "
            "them"
        )
    if type(optimizer) is torch.optim.Adam and len(decoupled) > 1:
        problems.append("some of its groups have decoupled_weight_decay=True and some not; set it alike for all")
    if not groups and not problems:
        problems.append("no parameter of the model is trained; set requires_grad=True on those that should be")
    if problems:
        raise UnsupportedError(f"The optimizer {kind} cannot be recorded: " + "; ".join(problems) + ".")
    if kind == "SGD":
        momentum = any(group["momentum"] != 0 for group in optimizer.param_groups)
        slots: tuple[str, ...] = (PARAM, "momentum_buffer") if momentum else (PARAM,)
    else:
        slots = (PARAM, "exp_avg", "exp_avg_sq")
    order = [name for name, _ in model.named_parameters() if name in groups]
    # torch's AdamW is its Adam with this flag.
    kind = "AdamW" if kind == "Adam" and decoupled == {True} else kind
    return Rule(kind, {name: groups[name] for name in order}, slots)


def hypers_of(optimizer: torch.optim.Optimizer, rule: Rule, params: dict[str, Tensor]) -> list[Hyper]:
    """Every group's hyperparameters as the coming step will use them."""
    return [
        _group_hypers(optimizer, rule, number, [params[name] for name, g in rule.groups.items() if g == number])
        for number in range(len(optimizer.param_groups))
    ]


def _group_hypers(optimizer: torch.optim.Optimizer, rule: Rule, number: int, params: list[Tensor]) -> Hyper:
    group = optimizer.param_groups[number]
    if group.get("maximize"):
        raise UnsupportedError(f"Parameter group {number} has maximize=True: minimise the negative loss instead.")
    if group.get("amsgrad"):
        raise UnsupportedError(f"Parameter group {number} has amsgrad=True: set amsgrad=False.")
    states = [optimizer.state.get(param, {}) for param in params]
    if rule.kind == "SGD":
        if group["momentum"] != 0 and "momentum_buffer" not in rule.slots:
            raise UnsupportedError(f"Parameter group {number} turned momentum on while training: start with it on.")
        started = {state.get("momentum_buffer") is not None for state in states}
        if len(started) > 1:
            raise UnsupportedError(
                f"Only some parameters of group {number} have momentum yet: put new ones in a group."
            )
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
        return {**{name: float(group[name]) for name in names}, "started": float(started.pop() if started else 0)}
    counts = {int(state["step"]) if "step" in state else 0 for state in states}
    if len(counts) > 1:
        raise UnsupportedError(
            f"The parameters of group {number} have taken different numbers of steps: split the group."
        )
    beta1, beta2 = (float(beta) for beta in group["betas"])
    hyper = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
    return {**hyper, "beta1": beta1, "beta2": beta2, "step": float(counts.pop() + 1 if counts else 1)}
