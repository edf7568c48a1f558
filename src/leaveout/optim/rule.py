"""The optimizer of one run: its steps as pure functions of state, gradient and hyperparameters, and derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from leaveout._util.trees import PARAM, Params, State, height, memory, pullback
from leaveout.optim.averaging import AVERAGE, mixed, shares
from leaveout.optim.clip import Clip
from leaveout.optim.definition import FUSED, IDLE, STILL, Definition, Division, Hyper, Slots, Values
from leaveout.optim.registry import optimizers

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Indexed by a column ``<hyperparameter>_dtype``; 0 also stands for a Python number, which computes the same."""

Step = Callable[[Slots, torch.Tensor, Values], Slots]

Penalty = Callable[[Params], Tensor]
"""What a training loop adds to the loss of every step: a number computed from the parameters alone."""

SHARE = "penalty share"
"""How much of it a step got, beside its hyperparameters: a short window of micro-batches gets less than a full one."""


@dataclass(frozen=True)
class Rule:
    """The kind of optimizer, the parameter group of each parameter, and the slots of the state.

    ``extras`` are the hyperparameter columns that this run has in addition to those its optimizer always has: options
    that a group turns on, and the dtypes of hyperparameters that torch holds as tensors.

    Three things come from the training loop rather than the optimizer. The gradient of ``penalty``, a function of the
    parameters that belongs to no example, is added to the gradient first; ``clip`` is applied to the sum. ``assigned``
    are buffers of the model, such as BatchNorm's running statistics: the "gradient" under such a name is
    the buffer's new value, which the step assigns.
    """

    kind: str
    groups: dict[str, int]
    slots: tuple[str, ...]
    # Left out of the repr so that the fingerprints of runs without any of them do not change.
    extras: tuple[str, ...] = field(default=(), repr=False)
    clip: Clip | None = field(default=None, repr=False)
    assigned: tuple[str, ...] = field(default=(), repr=False)
    penalty: Penalty | None = field(default=None, repr=False)
    # In a step read from disk, a group's hyperparameters may also say that its parameters were skipped (STILL), or took
    # the step with a zero gradient (IDLE).

    def __post_init__(self) -> None:
        if self.kind not in optimizers():
            raise ValueError(f"unknown optimizer {self.kind!r}")
        if self.own_slots not in allowed_slots(self.definition) or AVERAGE in self.slots[:-1]:
            raise ValueError(f"unknown slots {self.slots}")
        if self.extras != tuple(name for name in allowed_extras(self.definition) if name in self.extras):
            raise ValueError(f"unknown columns {self.extras}")

    @property
    def definition(self) -> Definition:
        """The optimizer's definition."""
        return optimizers()[self.kind]

    @cached_property
    def hypers(self) -> tuple[str, ...]:
        """What is recorded for each group at each step, in the order of the columns."""
        return (*self.definition.hypers, *self.extras)

    @cached_property
    def own_slots(self) -> tuple[str, ...]:
        """The optimizer's own slots: all but the weight average."""
        return tuple(slot for slot in self.slots if slot != AVERAGE)

    def averaging(self, *, on: bool) -> Rule:
        """Return the same rule with or without the slot of the weight average."""
        return replace(self, slots=(*self.own_slots, AVERAGE) if on else self.own_slots)

    def shape(self, slot: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a slot for a parameter of this shape."""
        return tuple(shape) if slot == AVERAGE else self.definition.shape(slot, shape)

    def step_parameter(self, function: Step, slots: Slots, gradient: torch.Tensor, hyper: Values) -> Slots:
        """Return one parameter's slots after the optimizer's ``function`` and the averaging."""
        own = {slot: slots[slot] for slot in self.own_slots}
        new = own if hyper.get(STILL) else function(own, gradient, hyper)
        if AVERAGE not in self.slots:
            return new
        return {**new, AVERAGE: mixed(slots[AVERAGE], new[PARAM], shares(hyper))}

    @property
    def linear(self) -> bool:
        """Say whether the step is linear in (state, gradient) together, so that it is its own derivative."""
        return self.additive and self.penalty is None

    @property
    def additive(self) -> bool:
        """Say whether the step is linear in the gradient of the batch, whatever else it does with the state."""
        return self.definition.linear and self.clip is None

    @property
    def divides(self) -> bool:
        """Say whether the optimizer's steps divide by the root of a slot."""
        return type(self.definition).division is not Definition.division

    def divisions(self, hypers: Sequence[Hyper]) -> list[Division | None]:
        """Return each group's division by a root at one step, in plain numbers."""
        divisions = [None if hyper.get(STILL) else self.definition.division(values(hyper)) for hyper in hypers]
        return [one and Division(*one[:2], *(float(number) for number in one[2:])) for one in divisions]

    def extended(self, clip: Clip | None, assigned: Sequence[str], penalty: Penalty | None = None) -> Rule:
        """Return the same rule with a penalty, clipping before the step and buffers that the step assigns."""
        return replace(self, clip=clip, assigned=tuple(assigned), penalty=penalty)

    def restricted(self, names: Sequence[str]) -> Rule:
        """Return the same rule for some of the parameters."""
        return replace(self, groups={name: group for name, group in self.groups.items() if name in names})

    def beside(self, params: Params, trained: Sequence[str]) -> Rule:
        """Return the rule of some parameters with a penalty on all that are trained, of which the others stay here."""
        others = {name: params[name] for name in trained if name not in self.groups}
        whole = self.penalty
        if whole is None or not others:
            return self
        return replace(self, penalty=lambda own: whole({**others, **own}))

    def step(self, state: State, gradient: Params, hypers: Sequence[Hyper]) -> State:
        """Compute O(s, g): the state of one model after one step."""
        return self._each(self.definition.step, state, self._given(state, gradient, hypers), hypers)

    def repeat(self, state: State, gradient: Params, hypers: Sequence[Hyper]) -> State:
        """Compute O(s, g) bit for bit as it was recorded: with fused kernels if the step was taken with them."""
        return self._each(self.definition.repeat, state, self._given(state, gradient, hypers), hypers)

    def steps(self, state: State, gradient: Params, hypers: Sequence[Hyper]) -> State:
        """Compute O(s, g) for a stack of models."""
        if self.definition.stacking == "loop":
            alone = [self.step(_row(state, i), _row({"": gradient}, i)[""], hypers) for i in range(height(gradient))]
            return {
                slot: {name: torch.stack([one[slot][name] for one in alone]) for name in alone[0][slot]}
                for slot in self.slots
            }
        return self._stacked(self.definition.step, hypers)(state, gradient)

    @property
    def by_coordinate(self) -> bool:
        """Say whether a step moves each coordinate by its own slots and gradient alone, and nothing else."""
        plain = self._plain and not self.assigned and AVERAGE not in self.slots
        return plain and self.definition.stacking == "elementwise"

    def jumped(
        self, name: str, slots: tuple[Slots, Slots], gradients: tuple[Tensor, Tensor], hypers: Sequence[Hyper]
    ) -> Slots:
        """Compute O(s, g − ℓ) − O(s, g) for some coordinates of a parameter, from (s, O(s, g)) and (g, rows ℓ)."""
        hyper = hypers[self.groups[name]]
        if hyper.get(STILL) or hyper.get(IDLE):
            return {slot: torch.zeros_like(gradients[1]) for slot in slots[0]}
        return self.definition.jumped(*slots, *gradients, values(hyper))

    def steps_(self, state: State, gradient: Params, hypers: Sequence[Hyper]) -> State:
        """Compute ``steps`` in place: the state and the gradient are overwritten."""
        if not self._plain or self.definition.stacking != "elementwise":
            return self.steps(state, gradient, hypers)
        used = {memory(tensor) for params in state.values() for tensor in params.values()}
        gradient = self.received(gradient, hypers)
        for name, group in self.groups.items():
            if hypers[group].get(STILL):
                continue
            # Two parameters with equal gradients may share one tensor, and one that the loss does not use may have a
            # single zero for all rows.
            own = gradient[name].contiguous()
            own = own.clone() if memory(own) in used else own
            used.add(memory(own))
            slots = {slot: state[slot][name] for slot in self.own_slots}
            if self.definition.step_(slots, own, values(hypers[group])) is None:
                return self.steps(state, gradient, hypers)
        self._assign(state, state, gradient, hypers)
        if AVERAGE in self.slots:
            new, share = state[PARAM], {name: shares(hypers[group]) for name, group in self.groups.items()}
            state[AVERAGE] |= {name: mixed(state[AVERAGE][name], new[name], share[name]) for name in self.groups}
        return state

    def _assign(self, new: State, old: State, gradient: Params, hypers: Sequence[Hyper]) -> None:
        """Assign buffers their new values, and update their averages."""
        new[PARAM] |= {name: gradient[name] for name in self.assigned}
        if AVERAGE in self.slots:
            share = shares(hypers[0], buffers=True)
            held = [name for name in self.assigned if name in old[AVERAGE]]
            new[AVERAGE] |= {name: mixed(old[AVERAGE][name], gradient[name], share) for name in held}

    def tangent(self, at: tuple[State, Params], along: tuple[State, Params], hypers: Sequence[Hyper]) -> State:
        """Compute ∂O(s, g)·(ds, dg), for stacks of the same height."""
        if self.linear:
            return self.steps(*along, hypers)
        # Forward mode rejects tensors that share memory along a dimension, such as an expanded state.
        state, gradient = at
        whole = {slot: {name: tensor.contiguous() for name, tensor in params.items()} for slot, params in state.items()}
        point = (whole, {name: tensor.contiguous() for name, tensor in gradient.items()})
        return jvp(self._stacked(self.definition.smooth, hypers), point, along)[1]

    def cotangent(self, at: tuple[State, Params], vector: State, hypers: Sequence[Hyper]) -> tuple[State, Params]:
        """Compute ∂O(s, g)ᵀ·u, the part for the state and the part for the gradient, for stacks of the same height."""
        if self.linear and (pulled := self._transposed(vector, hypers)):
            return pulled
        if self._plain and (pulled := self._pulled(at, vector, hypers)):
            return pulled
        _, pull = pullback(self._stacked(self.definition.smooth, hypers), *at)
        state, gradient = pull(vector)
        return state, gradient

    def push_average(self, vector: State, hypers: Sequence[Hyper]) -> State:
        """Push a displacement of the state through a step that moves nothing except the average."""
        own = {n: shares(hypers[self.groups.get(n, 0)], buffers=n not in self.groups) for n in vector[AVERAGE]}
        return {**vector, AVERAGE: {n: mixed(t, vector[PARAM][n], own[n]) for n, t in vector[AVERAGE].items()}}

    def pull_average(self, vector: State, hypers: Sequence[Hyper]) -> State:
        """Pull a cotangent of the state back through a step that moves nothing except the average."""
        new = {slot: dict(params) for slot, params in vector.items()}
        for name in vector[AVERAGE]:
            buffers = name not in self.groups
            kept, added = shares(hypers[0 if buffers else self.groups[name]], buffers=buffers)
            new[PARAM][name] = vector[PARAM][name].add(vector[AVERAGE][name], alpha=added)
            new[AVERAGE][name] = vector[AVERAGE][name].mul(kept)
        return new

    def consumed(self, before: State, after: State, hypers: Sequence[Hyper]) -> Params | None:
        """Recover the gradient that led from one state to the next, up to rounding; None if the states do not tell.

        For a clipped gradient they tell only what clipping left of it, and with a penalty the sum.
        """
        if not self._plain:
            return None
        used: Params = {}
        for name, group in self.groups.items():
            old, new = ({slot: state[slot][name] for slot in self.own_slots} for state in (before, after))
            stopped = hypers[group].get(STILL) or hypers[group].get(IDLE)
            gradient = (
                torch.zeros_like(old[PARAM]) if stopped else self.definition.consumed(old, new, values(hypers[group]))
            )
            if gradient is None:
                return None
            used[name] = gradient
        return used | {name: after[PARAM][name] for name in self.assigned}

    def _each(self, function: Step, state: State, gradient: Params, hypers: Sequence[Hyper]) -> State:
        new: State = {slot: {} for slot in self.slots}
        used = [values(hyper) for hyper in hypers]
        for name, group in self.groups.items():
            slots = {slot: state[slot][name] for slot in self.slots}
            for slot, tensor in self.step_parameter(function, slots, gradient[name], used[group]).items():
                new[slot][name] = tensor
        self._assign(new, state, gradient, hypers)
        return new

    @property
    def _plain(self) -> bool:
        """Say whether the optimizer received the gradient of the batch as it was."""
        return self.clip is None and self.penalty is None

    def _given(self, state: State, gradient: Params, hypers: Sequence[Hyper]) -> Params:
        """Return the gradient that the optimizer of one model was given: with the penalty's, then clipped."""
        return self.clipped(self.received(self.penalised(state, gradient, hypers), hypers))

    def penalised(self, state: State, gradient: Params, hypers: Sequence[Hyper]) -> Params:
        """Add the penalty's gradient to that of one model's batch."""
        if self.penalty is None:
            return gradient
        added, share = grad(self.penalty)({name: state[PARAM][name] for name in self.groups}), _share(hypers)
        return {**gradient, **{name: gradient[name] + share * tensor for name, tensor in added.items()}}

    def bent(self, params: Params, vectors: Params, hypers: Sequence[Hyper] = ()) -> Params:
        """Compute the penalty's Hessian at these parameters times each vector of a stack."""
        if self.penalty is None:
            return {name: torch.zeros_like(stack) for name, stack in vectors.items()}
        slope, own, share = grad(self.penalty), {name: params[name] for name in self.groups}, _share(hypers)
        along = {name: vectors[name] for name in self.groups}
        bent = vmap(lambda one: jvp(slope, (own,), (one,))[1])(along)
        return {name: share * bent[name] if name in bent else torch.zeros_like(v) for name, v in vectors.items()}

    def received(self, gradient: Params, hypers: Sequence[Hyper]) -> Params:
        """Return the gradient as the optimizer received it: zero for parameters that had none."""
        stopped = [group for group, hyper in enumerate(hypers) if hyper.get(STILL) or hyper.get(IDLE)]
        if not stopped:
            return gradient
        return {n: torch.zeros_like(t) if self.groups.get(n) in stopped else t for n, t in gradient.items()}

    def clipped(self, gradient: Params) -> Params:
        """Return the gradient as clipping leaves it; new values of buffers stay as they are."""
        if self.clip is None:
            return gradient
        clipped = self.clip({name: gradient[name] for name in self.groups})
        return {**clipped, **{name: gradient[name] for name in self.assigned}}

    def _stacked(self, function: Step, hypers: Sequence[Hyper]) -> Callable[[State, Params], State]:
        def alone(state: State, gradient: Params) -> State:
            return self._each(function, state, self._given(state, gradient, hypers), hypers)

        def given(params: Params, gradient: Params) -> Params:
            return self._given({PARAM: params}, gradient, hypers)

        def whole(state: State, gradient: Params) -> State:
            if self._plain or not height(gradient):
                return self._each(function, state, self.received(gradient, hypers), hypers)
            return self._each(function, state, vmap(given)(state[PARAM], gradient), hypers)

        return whole if self.definition.stacking == "elementwise" else vmap(alone)

    def _transposed(self, vector: State, hypers: Sequence[Hyper]) -> tuple[State, Params] | None:
        return self._by_parameter(vector, hypers, lambda _, slots, hyper: self.definition.transposed(slots, hyper))

    def _pulled(self, at: tuple[State, Params], vector: State, hypers: Sequence[Hyper]) -> tuple[State, Params] | None:
        before, gradient = at[0], self.received(at[1], hypers)

        def pull(name: str, slots: Slots, hyper: Values) -> tuple[Slots, torch.Tensor] | None:
            return self.definition.pulled({s: before[s][name] for s in self.own_slots}, gradient[name], slots, hyper)

        return self._by_parameter(vector, hypers, pull)

    def _by_parameter(
        self,
        vector: State,
        hypers: Sequence[Hyper],
        pull: Callable[[str, Slots, Values], tuple[Slots, torch.Tensor] | None],
    ) -> tuple[State, Params] | None:
        """Assemble a pull-back from what ``pull`` returns for each parameter; None if it returns None."""
        state: State = {slot: {} for slot in self.slots}
        gradient: Params = {}
        for name, group in self.groups.items():
            slots = {slot: vector[slot][name] for slot in self.own_slots}
            if AVERAGE in self.slots:
                kept, added = shares(hypers[group])
                slots[PARAM] = slots[PARAM].add(vector[AVERAGE][name], alpha=added)
                state[AVERAGE][name] = vector[AVERAGE][name].mul(kept)
            pulled: tuple[Slots, torch.Tensor] | None = slots, torch.zeros_like(slots[PARAM])
            if not hypers[group].get(STILL):
                pulled = pull(name, slots, values(hypers[group]))
            if pulled is None:
                return None
            gradient[name] = torch.zeros_like(pulled[1]) if hypers[group].get(IDLE) else pulled[1]
            for slot, tensor in pulled[0].items():
                state[slot][name] = tensor
        for name in self.assigned:
            state[PARAM][name], gradient[name] = torch.zeros_like(vector[PARAM][name]), vector[PARAM][name]
            if AVERAGE in self.slots and name in vector[AVERAGE]:
                kept, added = shares(hypers[0], buffers=True)
                gradient[name] = gradient[name].add(vector[AVERAGE][name], alpha=added)
                state[AVERAGE][name] = vector[AVERAGE][name].mul(kept)
        return state, gradient


def values(hyper: Hyper) -> Values:
    """Return recorded hyperparameters as torch used them: a tensor of the same dtype where torch held a tensor.

    >>> values({"lr": 0.1, "lr_dtype": 1.0})["lr"]
    tensor(0.1000)
    """
    typed = [name for name in hyper if name.endswith(TYPE) and hyper[name]]
    if not typed:
        return hyper
    of = {name.removesuffix(TYPE): DTYPES[int(hyper[name])] for name in typed}
    return {**hyper, **{name: torch.tensor(hyper[name], dtype=dtype) for name, dtype in of.items()}}


TYPE = "_dtype"


def allowed_slots(definition: Definition) -> list[tuple[str, ...]]:
    """Return the slots that runs of an optimizer can have: the optional ones in order, each present or not."""
    allowed = [definition.slots]
    for slot, _ in definition.optional:
        allowed += [(*slots, slot) for slots in allowed]
    return allowed


def allowed_extras(definition: Definition) -> list[str]:
    """Return the extra columns that runs of an optimizer can have, in order."""
    kernel = [FUSED] if has_kernel(definition) else []
    return [*definition.options, *(f"{name}{TYPE}" for name in definition.hypers), *kernel]


def has_kernel(definition: Definition) -> bool:
    """Say whether the optimizer's fused kernel is known, so that its steps can be repeated to the last bit."""
    return type(definition).fused is not Definition.fused


def _share(hypers: Sequence[Hyper]) -> float:
    return hypers[0].get(SHARE, 1.0) if hypers else 1.0


def _row(state: State, i: int) -> State:
    return {slot: {name: tensor[i] for name, tensor in params.items()} for slot, params in state.items()}
