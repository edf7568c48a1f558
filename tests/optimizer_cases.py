"""Every optimizer of the registry with every setting that its class takes, and torch's own step as the known answer.

Nothing here uses leaveout's steps: states are set on a live optimizer of torch, which takes the step.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from leaveout.optim import Definition, optimizers

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.8, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "betas": {"betas": (0.5, 0.7), "eps": 1e-3},
    "amsgrad": {"amsgrad": True, "betas": (0.5, 0.6)},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "centered": {"centered": True, "momentum": 0.8},
    "decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.3},
    "accumulated": {"lr_decay": 0.01, "initial_accumulator_value": 0.1},
    "adjusted": {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
    "unclamped": {"adjust_lr_fn": "spectral_unclamped"},
    "clipped": {"d": 1.5, "eps": (1e-6, 1e-2), "weight_decay": 0.1},
}
"""Tried wherever a class takes them all."""


def _takes(kind: type, options: dict[str, Any]) -> bool:
    try:
        kind([nn.Parameter(torch.zeros(1, 1))], **options)
    except (TypeError, ValueError):  # no such option, or no such value in this version of PyTorch
        return False
    return True


CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    f"{name}, {setting}": (definition.torch_class, options)
    for name, definition in optimizers().items()
    if definition.torch_class is not None
    for setting, options in SETTINGS.items()
    if _takes(definition.torch_class, options)
}

Make = Callable[[nn.Module], torch.optim.Optimizer]


def make_of(case: str, **more: Any) -> Make:
    """What builds the case's optimizer, with two groups, over those parameters that it can train."""
    kind, options = CASES[case]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        try:
            kind([nn.Parameter(torch.zeros(1))])
        except ValueError:  # matrices only
            for param in model.parameters():
                param.requires_grad_(param.ndim == 2)
        trained = [param for param in model.parameters() if param.requires_grad]
        half = len(trained) // 2
        rate = max(0.02, inspect.signature(kind).parameters["lr"].default)  # Adadelta's unit is 1
        other = {"lr": torch.tensor(0.15 * rate) if isinstance(more.get("lr"), Tensor) else 0.15 * rate}
        if "weight_decay" in inspect.signature(kind).parameters:
            other["weight_decay"] = 0.05
        groups = [{"params": trained[:half]}, {"params": trained[half:], **other}]
        own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in more.items()}
        return kind(groups, **{"lr": rate, **options, **own})

    return make


def definition_of(case: str) -> Definition:
    return optimizers()[case.split(",")[0]]


def unrounded(monkeypatch: Any) -> None:
    """Takes out the rounding within steps that have no derivative for it, in torch and here alike."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    monkeypatch.setattr(torch, "bfloat16", torch.float64)  # newer ones say .to(torch.bfloat16)
    for definition in optimizers().values():
        if type(definition).smooth is not Definition.smooth:
            monkeypatch.setattr(type(definition), "step", type(definition).smooth)


class Steps:
    """A plain training loop, each of whose steps can be taken again by torch from any state and with any weights."""

    def __init__(
        self, model: nn.Module, make: Make, loss: nn.Module, data: tuple[Tensor, Tensor], batches: list
    ) -> None:
        self.losses, (self.x, self.y), self.batches = copy.deepcopy(loss), data, batches
        self.losses.reduction = "none"
        model = copy.deepcopy(model)
        optimizer = make(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        self.ones = torch.ones(len(self.x), dtype=torch.float64)
        self.live = []
        for ids in batches:
            held = [dict(optimizer.state.get(param, {})) for param in self._trained(model)]
            self.live.append(copy.deepcopy((model, optimizer, held)))
            self._backward(model, ids, self.ones)
            optimizer.step()
            schedule.step()
        self.final = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
        self.keys = [
            (param, key)
            for param in range(len(self._params(0)))
            for key, held in optimizer.state[self._trained(model)[param]].items()
            if isinstance(held, Tensor) and held.is_floating_point() and key not in ("step", "mu_product")
        ]

    @staticmethod
    def _trained(model: nn.Module) -> list[nn.Parameter]:
        return [param for param in model.parameters() if param.requires_grad]

    def at(self, i: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Model and optimizer before a step; not by ``load_state_dict``, which changes the type of some state."""
        model, optimizer, held = self.live[i]
        for param, state in zip(self._trained(model), copy.deepcopy(held), strict=True):
            optimizer.state[param] = state
        return model, optimizer

    def _params(self, i: int) -> list[nn.Parameter]:
        return self._trained(self.live[i][0])

    def _backward(self, model: nn.Module, ids: list[int], weights: Tensor) -> None:
        model.zero_grad()
        losses = self.losses(model(self.x[ids]), self.y[ids])
        (torch.dot(weights[ids], losses) / len(ids)).backward()

    def state(self, i: int) -> Tensor:
        """The flat state before a step: parameters, then buffers, zero where they do not exist yet."""
        model, _ = self.at(i)
        parts = [param.detach() for param in self._trained(model)]
        parts += [self._held(i, param, key) for param, key in self.keys]
        return torch.cat([part.flatten() for part in parts]).clone()

    def _held(self, i: int, param: int, key: str) -> Tensor:
        _, optimizer, _ = self.live[i]
        last = self.live[-1]
        like = last[1].state[self._trained(last[0])[param]].get(key, self._trained(last[0])[param])
        return optimizer.state[self._params(i)[param]].get(key, torch.zeros_like(like))

    def step(self, i: int, state: Tensor, weights: Tensor | None = None, gradient: Tensor | None = None) -> Tensor:
        """F_i(s; w), or O_i(s, g), by torch; buffers that do not exist yet stay so."""
        model, optimizer = self.at(i)
        before = [param.detach().clone() for param in self._trained(model)]
        params = self._trained(model)
        held = [self._held(i, param, key) for param, key in self.keys]
        parts = state.split([tensor.numel() for tensor in [*params, *held]])
        with torch.no_grad():
            for tensor, part in zip([*params, *held], parts, strict=True):
                tensor.copy_(part.reshape(tensor.shape))
        if gradient is None:
            self._backward(model, self.batches[i], self.ones if weights is None else weights)
        else:
            for param, part in zip(params, gradient.split([p.numel() for p in params]), strict=True):
                param.grad = part.reshape(param.shape).clone()
        optimizer.step()
        after = [param.detach().flatten() for param in params]
        for (param, key), tensor in zip(self.keys, held, strict=True):
            after.append(optimizer.state[params[param]].get(key, tensor).flatten())
        result = torch.cat(after).clone()
        with torch.no_grad():
            for param, old in zip(params, before, strict=True):
                param.copy_(old)
        return result

    def retrained(self, k: int, weight: float) -> Tensor:
        """θ'_N with one example weighted."""
        weights = self.ones.clone()
        weights[k] = weight
        state = self.state(0)
        for i in range(len(self.batches)):
            state = self.step(i, state, weights)
        return state[: len(self.final)]

    def displacement(self, k: int, method: str, h: float = 1e-5) -> Tensor:
        """δ_N by the recurrences, with central differences of torch's own steps at the recorded states."""
        without, more, less = self.ones.clone(), self.ones.clone(), self.ones.clone()
        without[k], more[k], less[k] = 0, 1 + h, 1 - h
        moved = torch.zeros_like(self.state(0))
        for i in range(len(self.batches)):
            at = self.state(i)
            acc = method == "acc" and k in self.batches[i]
            weights = without if acc else self.ones
            scale = h / moved.abs().max().clamp(min=1e-12)
            ahead, behind = (self.step(i, at + sign * scale * moved, weights) for sign in (1, -1))
            jump = (
                self.step(i, at, without) - self.step(i, at)
                if acc
                else -(self.step(i, at, more) - self.step(i, at, less)) / (2 * h)
            )
            moved = (ahead - behind) / (2 * scale) + jump
        return moved[: len(self.final)]

    def jacobian(self, i: int, gradient: Tensor, h: float = 1e-4) -> Tensor:
        """∂O_i(s, g), dense, a column for each number of (s, g)."""
        at = torch.cat([self.state(i), gradient])
        size = len(at) - len(gradient)

        def after(vector: Tensor) -> Tensor:
            return self.step(i, vector[:size], gradient=vector[size:])

        def columns() -> Iterator[Tensor]:
            for j in range(len(at)):
                move = torch.zeros_like(at)
                move[j] = max(h * float(at[j].abs()), 2e-9)  # second moments are small, and must not be left behind
                yield (after(at + move) - after(at - move)) / (2 * move[j])

        return torch.stack(list(columns()), dim=1)
