"""What each optimizer's file defines: hyperparameters, state, the pure step, and how it is read and restored."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from leaveout._util.trees import PARAM

Hyper: TypeAlias = dict[str, float]
"""The hyperparameters of one parameter group at one step, as recorded."""

Values: TypeAlias = Mapping[str, Any]
"""The same as a step uses them: a hyperparameter that torch holds as a tensor is a tensor again."""

STILL = "still"
"""A column that only steps read from disk have: torch skipped this group's parameters, as they had no gradient."""

IDLE = "idle"
"""The same for frozen parameters, which took the step with a zero gradient whatever the loss says."""

FUSED = "fused"
"""A column that only runs with such a group have: torch used its fused kernel, which rounds differently."""

Slots: TypeAlias = dict[str, Tensor]
"""One parameter's tensors by slot."""

Group: TypeAlias = Mapping[str, Any]
"""One of ``optimizer.param_groups``."""


class Division(NamedTuple):
    """How a step divides by a root: ``θ ← θ − size · x / (√v + eps)``.

    ``square`` is the slot v, and ``square_keeps`` the share of it that each step keeps. x is the slot ``mean``, of
    which each step keeps ``mean_keeps``, or the gradient itself if ``mean`` is None.
    """

    mean: str | None
    square: str
    mean_keeps: float
    square_keeps: float
    size: float
    eps: float


class Definition:
    """One optimizer of ``torch.optim``, as the rest of the package sees it.

    A file in this package defines a subclass and names an instance ``OPTIMIZER``; the registry finds it. The step
    repeats torch's single-tensor arithmetic operation by operation, out of place, so that a replay follows the
    recorded run to the last bit. ``torch.func`` differentiates it, unless the file defines ``transposed`` or
    ``pulled``.
    """

    name: ClassVar[str]
    """The name used in manifests."""

    torch_class: ClassVar[type[torch.optim.Optimizer] | None]
    """None if this version of torch does not have it; recorded runs can be replayed all the same."""

    hypers: ClassVar[tuple[str, ...]]
    """What is recorded for each group at each step, in the order of the columns on disk, which must never change."""

    counters: ClassVar[tuple[str, ...]] = ("step",)
    """Those of ``hypers`` that the optimizer counts on its own."""

    options: ClassVar[tuple[str, ...]] = ("maximize",)
    """Flags whose columns are recorded only if a group turns them on."""

    slots: ClassVar[tuple[str, ...]] = (PARAM,)
    """The slots that the state of a parameter always has."""

    optional: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Further slots, each with the group setting that requires it."""

    linear: ClassVar[bool] = False
    """Say whether the step is linear in (state, gradient) together, so that it is its own derivative."""

    stacking: ClassVar[Literal["elementwise", "vmap", "loop"]] = "elementwise"
    """How a stack of models takes a step: with the same operations, with ``vmap``, or one model after the other (if
    ``vmap`` would round differently)."""

    adam_moments: ClassVar[bool] = False
    """Say whether m̂/(√v̂ + ε), from ``exp_avg`` and ``exp_avg_sq``, is the direction of the step."""

    def step(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute O(s, g) for one parameter: its slots after the step."""
        raise NotImplementedError

    def fused(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots | None:  # noqa: ARG002
        """Compute O(s, g) with torch's fused kernel, bit for bit as torch's own step; None if it is not known."""
        return None

    def repeat(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute O(s, g) with the kernel that took the recorded step."""
        new = self.fused(slots, gradient, hyper) if hyper.get(FUSED) else None
        return self.step(slots, gradient, hyper) if new is None else new

    def smooth(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """Compute the step as it is differentiated: the step itself, unless torch rounds within it."""
        return self.step(slots, gradient, hyper)

    def step_(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots | None:  # noqa: ARG002
        """Take the step by writing into the slots and the gradient; return None if there is no such form."""
        return None

    def transposed(self, vector: Slots, hyper: Values) -> tuple[Slots, Tensor] | None:  # noqa: ARG002
        """Compute ∂Oᵀ·u of a linear step, for the old slots and for g; None leaves it to ``torch.func``."""
        return None

    def pulled(self, slots: Slots, gradient: Tensor, vector: Slots, hyper: Values) -> tuple[Slots, Tensor] | None:  # noqa: ARG002
        """Compute ∂O(s, g)ᵀ·u in closed form, for the old slots and for g; None leaves it to ``torch.func``."""
        return None

    def jumped(self, slots: Slots, after: Slots, gradient: Tensor, leaving: Tensor, hyper: Values) -> Slots:
        """Compute O(s, g − ℓ) − O(s, g) for every row ℓ of ``leaving``; ``after`` is O(s, g)."""
        moved = self.step(slots, gradient - leaving, hyper)
        return {slot: tensor - after[slot] for slot, tensor in moved.items()}

    def consumed(self, slots: Slots, after: Slots, hyper: Values) -> Tensor | None:  # noqa: ARG002
        """Recover the gradient that led from one state to the next; None if no slot determines it."""
        return None

    def division(self, hyper: Values) -> Division | None:  # noqa: ARG002 - for subclasses
        """Return how the step divides by the root of a slot, if it does; this is used to read the jump."""
        return None

    def shape(self, slot: str, shape: Sequence[int]) -> tuple[int, ...]:  # noqa: ARG002 - for subclasses
        """Return the shape of a slot for a parameter of this shape; (0,), empty, if the parameter does not use it."""
        return tuple(shape)

    def coupled_decay(self, hyper: Hyper) -> float:
        """Return the weight decay that is added to the gradient, as an L2 term of the loss would be."""
        return hyper["weight_decay"]

    def phrase(self, hyper: Hyper) -> str:
        """Describe the optimizer and its distinctive settings, for use in a sentence."""
        parts = []
        if hyper.get("momentum"):
            parts.append(f"{'Nesterov ' if hyper.get('nesterov') else ''}momentum {hyper['momentum']:g}")
        if hyper["weight_decay"]:
            parts.append(f"weight decay {hyper['weight_decay']:g}")
        parts += [flag for flag in ("centered", *self.options) if hyper.get(flag)]
        return self.name + (f" ({', '.join(parts)})" if parts else "")

    # How a live optimizer is read.

    def describes(self, optimizer: object) -> bool:
        """Say whether this is the optimizer's definition; subclasses that keep torch's step count as the same."""
        return self.torch_class is not None and is_plain(optimizer, self.torch_class)

    def problems(self, groups: Sequence[Group]) -> list[str]:  # noqa: ARG002 - for subclasses
        """List the settings that cannot be reproduced, besides those that no optimizer may have."""
        return []

    def settings(self, group: Group, params: Sequence[Tensor]) -> dict[str, Any]:  # noqa: ARG002 - for subclasses
        """Return the part of ``hypers`` that the group holds, as torch holds it."""
        values = dict(group)
        if "betas" in group:
            values["beta1"], values["beta2"] = group["betas"]
        return {name: values[name] for name in self.hypers if name not in self.counters}

    def counted(self, group: Group, state: Mapping[str, Any]) -> tuple[float, ...]:  # noqa: ARG002 - for subclasses
        """Return one parameter's ``counters`` as the next step will use them."""
        return (float(state["step"]) + 1.0 if "step" in state else 1.0,)

    def restored(self, held: Slots, hyper: Hyper, group: Group, param: Tensor) -> dict[str, Any]:
        """Build ``optimizer.state[param]`` after a step with these hyperparameters from the recorded slots."""
        return {"step": counter(hyper["step"], group, param), **held}


def is_plain(optimizer: object, torch_class: type[torch.optim.Optimizer]) -> bool:
    """Say whether an optimizer uses that class's own step."""
    if not isinstance(optimizer, torch_class):
        return False
    # torch wraps a class's step when its first instance is created.
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch_class.step)


def counter(value: float, group: Group, param: Tensor) -> Tensor:
    """Create a step counter as torch would have created it."""
    if group.get("fused"):
        return torch.tensor(value, dtype=torch.float32, device=param.device)
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return torch.tensor(value, dtype=dtype, device=param.device if group.get("capturable") else "cpu")


def descent(gradient: Tensor, hyper: Values) -> Tensor:
    """Return the gradient that the step descends: −g if the loss is maximised."""
    return gradient.neg() if hyper.get("maximize") else gradient


def sqrt(square: Tensor) -> Tensor:
    """Compute √v, with derivative 0 at v = 0.

    There the gradient has been 0 so far, and m/(√v + ε) has derivative m'/ε.
    """
    if not (square.requires_grad or torch._C._are_functorch_transforms_active()):
        return square.sqrt()
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def larger(left: Tensor, right: Tensor) -> Tensor:
    """Return the elementwise maximum; where both are equal, its derivative is that of the second."""
    return torch.where(left > right, left, right)


def listed(names: Iterable[str]) -> str:
    """Join names as in a sentence.

    >>> listed(["SGD", "Adam", "AdamW"])
    'SGD, Adam or AdamW'
    """
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
