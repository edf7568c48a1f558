"""What every optimizer's file defines: hyperparameters, state, the pure step, how it is read and restored."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from leaveout._util.trees import PARAM

Hyper: TypeAlias = dict[str, float]
"""The hyperparameters of one parameter group at one step, as they are recorded."""

Values: TypeAlias = Mapping[str, Any]
"""The same as a step uses them: a hyperparameter that torch holds as a tensor is one again."""

STILL = "still"
"""A column that only steps that were read have: torch passed this group's parameters over, as they had no gradient."""

IDLE = "idle"
"""The same for parameters that took the step with a gradient of zero, whatever the loss says: frozen ones."""

FUSED = "fused"
"""A column that only runs with such a group have: torch took the step by its fused kernel, which rounds differently."""

Slots: TypeAlias = dict[str, Tensor]
"""One parameter's tensors by slot."""

Group: TypeAlias = Mapping[str, Any]
"""One of ``optimizer.param_groups``."""


class Division(NamedTuple):
    """How a step divides by a root: ``θ ← θ − size · x / (√v + eps)``.

    ``square`` is the slot v, of which each step keeps the share ``square_keeps``. x is the slot ``mean``, of which each
    step keeps ``mean_keeps``, or the gradient itself where ``mean`` is None.
    """

    mean: str | None
    square: str
    mean_keeps: float
    square_keeps: float
    size: float
    eps: float


class Definition:
    """One optimizer of ``torch.optim``, as everything else in the package knows it.

    A file of this package defines a subclass and names an instance ``OPTIMIZER``; the registry finds it. The step
    repeats torch's single-tensor arithmetic operation by operation, out of place, so that a replay follows the
    recorded run to the last bit. Its derivative is taken by ``torch.func``, unless the file gives ``transposed``.
    """

    name: ClassVar[str]
    """As manifests have it."""

    torch_class: ClassVar[type[torch.optim.Optimizer] | None]
    """None where this version of torch does not have it; recorded runs can be replayed all the same."""

    hypers: ClassVar[tuple[str, ...]]
    """What is recorded of each group at each step, in the order of the columns on disk: never change it."""

    counters: ClassVar[tuple[str, ...]] = ("step",)
    """Those of ``hypers`` that the optimizer counts by itself."""

    options: ClassVar[tuple[str, ...]] = ("maximize",)
    """Flags whose columns are recorded only where a group has them on."""

    slots: ClassVar[tuple[str, ...]] = (PARAM,)
    """What the state of a parameter always holds."""

    optional: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Further slots, each with the setting of a group that calls for it."""

    linear: ClassVar[bool] = False
    """Say whether the step is linear in (state, gradient) together, so that it is its own derivative."""

    stacking: ClassVar[Literal["elementwise", "vmap", "loop"]] = "elementwise"
    """How a stack of models steps: by the same operations, by ``vmap``, or one model after the other (where ``vmap``
    would round differently)."""

    adam_moments: ClassVar[bool] = False
    """Say whether m̂/(√v̂ + ε) of ``exp_avg`` and ``exp_avg_sq`` is the direction of its step."""

    def step(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """O(s, g) for one parameter: its slots after the step."""
        raise NotImplementedError

    def fused(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots | None:  # noqa: ARG002
        """O(s, g) by torch's fused kernel, the same bits as its own step; None where that is not known."""
        return None

    def again(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """O(s, g) by the kernel that took the step."""
        new = self.fused(slots, gradient, hyper) if hyper.get(FUSED) else None
        return self.step(slots, gradient, hyper) if new is None else new

    def smooth(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots:
        """The step that is differentiated: the step itself, unless torch rounds within it."""
        return self.step(slots, gradient, hyper)

    def step_(self, slots: Slots, gradient: Tensor, hyper: Values) -> Slots | None:  # noqa: ARG002
        """As ``step``, writing into the slots and the gradient; None where there is no such form."""
        return None

    def transposed(self, vector: Slots, hyper: Values) -> tuple[Slots, Tensor] | None:  # noqa: ARG002
        """∂Oᵀ·u for a linear step, in the old slots and in g; None where ``torch.func`` takes it."""
        return None

    def pulled(self, slots: Slots, gradient: Tensor, vector: Slots, hyper: Values) -> tuple[Slots, Tensor] | None:  # noqa: ARG002
        """∂O(s, g)ᵀ·u in closed form, in the old slots and in g; None where ``torch.func`` takes it."""
        return None

    def jumped(self, slots: Slots, after: Slots, gradient: Tensor, leaving: Tensor, hyper: Values) -> Slots:
        """O(s, g − ℓ) − O(s, g) for every row ℓ of ``leaving``; ``after`` is O(s, g)."""
        moved = self.step(slots, gradient - leaving, hyper)
        return {slot: tensor - after[slot] for slot, tensor in moved.items()}

    def consumed(self, slots: Slots, after: Slots, hyper: Values) -> Tensor | None:  # noqa: ARG002
        """The gradient that led from one state to the next; None where no slot tells it."""
        return None

    def division(self, hyper: Values) -> Division | None:  # noqa: ARG002 - for subclasses
        """Return how the step divides by the root of a slot, if it does: the jump is read with it."""
        return None

    def shape(self, slot: str, shape: Sequence[int]) -> tuple[int, ...]:  # noqa: ARG002 - for subclasses
        """The shape of a slot for a parameter of a shape; a slot that the parameter does not use is empty, (0,)."""
        return tuple(shape)

    def coupled_decay(self, hyper: Hyper) -> float:
        """The weight decay that enters with the gradient, as an L2 term of the loss would."""
        return hyper["weight_decay"]

    def phrase(self, hyper: Hyper) -> str:
        """The optimizer with what sets it apart, for a sentence."""
        parts = []
        if hyper.get("momentum"):
            parts.append(f"{'Nesterov ' if hyper.get('nesterov') else ''}momentum {hyper['momentum']:g}")
        if hyper["weight_decay"]:
            parts.append(f"weight decay {hyper['weight_decay']:g}")
        parts += [flag for flag in ("centered", *self.options) if hyper.get(flag)]
        return self.name + (f" ({', '.join(parts)})" if parts else "")

    # How a live optimizer is read.

    def describes(self, optimizer: object) -> bool:
        """Say whether this is the optimizer's definition; subclasses that keep torch's step are the same optimizer."""
        return self.torch_class is not None and is_plain(optimizer, self.torch_class)

    def problems(self, groups: Sequence[Group]) -> list[str]:  # noqa: ARG002 - for subclasses
        """What in the settings cannot be followed, beside what no optimizer may have."""
        return []

    def settings(self, group: Group, params: Sequence[Tensor]) -> dict[str, Any]:  # noqa: ARG002 - for subclasses
        """The group's own part of ``hypers``, as torch holds it."""
        values = dict(group)
        if "betas" in group:
            values["beta1"], values["beta2"] = group["betas"]
        return {name: values[name] for name in self.hypers if name not in self.counters}

    def counted(self, group: Group, state: Mapping[str, Any]) -> tuple[float, ...]:  # noqa: ARG002 - for subclasses
        """One parameter's ``counters`` as the coming step will use them."""
        return (float(state["step"]) + 1.0 if "step" in state else 1.0,)

    def restored(self, held: Slots, hyper: Hyper, group: Group, param: Tensor) -> dict[str, Any]:
        """``optimizer.state[param]`` after a step that used these hyperparameters, from the recorded slots."""
        return {"step": counter(hyper["step"], group, param), **held}


def is_plain(optimizer: object, torch_class: type[torch.optim.Optimizer]) -> bool:
    """Say whether an optimizer takes that class's own step."""
    if not isinstance(optimizer, torch_class):
        return False
    # torch wraps the step of a class when the first instance is made.
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch_class.step)


def counter(value: float, group: Group, param: Tensor) -> Tensor:
    """A step counter as torch would have made it."""
    if group.get("fused"):
        return torch.tensor(value, dtype=torch.float32, device=param.device)
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return torch.tensor(value, dtype=dtype, device=param.device if group.get("capturable") else "cpu")


def descent(gradient: Tensor, hyper: Values) -> Tensor:
    """The gradient that the step goes against: −g where the loss is maximised."""
    return gradient.neg() if hyper.get("maximize") else gradient


def sqrt(square: Tensor) -> Tensor:
    """√v, with derivative 0 at v = 0: there the gradient has been 0 so far, and m/(√v + ε) has derivative m'/ε."""
    if not (square.requires_grad or torch._C._are_functorch_transforms_active()):
        return square.sqrt()
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def larger(left: Tensor, right: Tensor) -> Tensor:
    """The larger one of two, elementwise; where they are equal, its derivative is the second one's."""
    return torch.where(left > right, left, right)


def listed(names: Iterable[str]) -> str:
    """Names as a sentence has them.

    >>> listed(["SGD", "Adam", "AdamW"])
    'SGD, Adam or AdamW'
    """
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
