"""States stored as the gradient that led to them: s_{i+1} = O(s_i, g_i), the same bits for a third of the disk space.

A state of AdamW is three tensors per parameter, and the step to the next state is a function of one more: the gradient
that the optimizer was given, after clipping and averaging. So most states of such a run are stored as that gradient,
and every ``EVERY``-th state is stored whole. Getting from one to the next is elementwise work, with no forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from leaveout._util.trees import PARAM, Params, State, memories, nbytes
from leaveout.optim import AVERAGE, Hyper, Rule

EVERY = 8
"""One state in this many is stored whole; a backward sweep holds this many at a time, if they fit into ``CACHE``."""

CACHE = 512 * 2**20
"""How many bytes of computed states are kept, but at least two states: a state of AdamW is three times the model."""

PROVEN = 3
"""How many of the first steps that are stored as gradients are recomputed as a test while recording."""

_VERSION = attrgetter("_version")


class StepGradients(NamedTuple):
    """What a step was given: each parameter's gradient, and the new values of buffers that training changes.

    The gradients are the loop's own tensors, not copies. Most loops drop them before the next backward pass;
    ``intact`` says whether this one did.
    """

    params: tuple[Tensor, ...]
    gradients: Params
    moved: Params
    versions: tuple[int, ...]

    def intact(self) -> bool:
        """Say whether nothing can have written to the gradients: they are unchanged, and no parameter still holds them.

        A gradient still held by a parameter may be zeroed through ``.data``, which the version counter does not see.
        """
        recorded = memories(list(self.gradients.values()))
        current = memories([param.grad for param in self.params if param.grad is not None])
        return self.unchanged() and recorded.isdisjoint(current)

    def unchanged(self) -> bool:
        """Say whether the version counters of the gradients are unchanged."""
        return self.versions == _versions(self.gradients)

    def copied(self) -> StepGradients:
        """Return the same with copies of the gradients, which nothing else can change."""
        copies = {name: tensor.clone() for name, tensor in self.gradients.items()}
        return self._replace(gradients=copies, versions=_versions(copies))

    @property
    def tensors(self) -> Params:
        """All tensors that are written, by name."""
        return {**self.gradients, **self.moved}


def step_gradients(
    params: Mapping[str, Tensor], moved: Callable[[], Params], *, alike: bool = True
) -> StepGradients | None:
    """Return what the last step was given; None if it did not move all parameters ``alike``."""
    if not alike:
        return None
    gradients: Params = {}
    for name, param in params.items():
        grad = param.grad
        if grad is None or grad.dtype != param.dtype or grad.is_sparse:
            return None
        gradients[name] = grad.detach()
    return StepGradients(tuple(params.values()), gradients, moved(), _versions(gradients))


def size_of(stored: State | StepGradients) -> int:
    """Count the bytes of a state as it is stored."""
    return nbytes({PARAM: stored.tensors} if isinstance(stored, StepGradients) else stored)


def _versions(tensors: Params) -> tuple[int, ...]:
    return tuple(map(_VERSION, tensors.values()))


def saves_room(rule: Rule) -> bool:
    """Say whether gradients take less space than states, and lead from one to the next by elementwise work."""
    return rule.definition.stacking == "elementwise" and len(rule.slots) > 1 and AVERAGE not in rule.slots


def disk_bytes(rule: Rule, state: State, steps: int) -> int:
    """Predict the size in bytes of all states of a run."""
    whole, gradients = nbytes(state), nbytes({PARAM: state[PARAM]})
    if not saves_room(rule):
        return (steps + 1) * whole
    return steps * gradients + (steps // EVERY + 1) * (whole - gradients)


def gives_state(rule: Rule, before: State, given: StepGradients, hypers: list[Hyper], after: State) -> bool:
    """Say whether a recomputed step gives the recorded state, bit for bit."""
    recomputed = next_state(rule, before, {name: tensor.cpu() for name, tensor in given.tensors.items()}, hypers)
    return all(torch.equal(recomputed[slot][name], tensor) for slot in after for name, tensor in after[slot].items())


@torch.no_grad()
def next_state(rule: Rule, state: State, given: Params, hypers: list[Hyper]) -> State:
    """Compute O(s, g): the state after a step, from what it was given."""
    buffers = tuple(name for name in given if name not in rule.groups)
    return rule.extended(None, buffers).repeat(state, given, hypers)


class StorageChoice:
    """Chooses which states are stored whole while a run is recorded, and which as gradients."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._allowed = saves_room(rule)
        self._proven = 0
        self._last: tuple[int, State] | None = None
        self._newest_whole = self._newest = 0
        self._copies = False
        self._sizes: dict[type, int] = {}

    def size(self, stored: State | StepGradients) -> int:
        """Count the bytes of a state as it is stored; they are the same for all whole states, and for all gradients."""
        kind = type(stored)
        if kind not in self._sizes:
            self._sizes[kind] = size_of(stored)
        return self._sizes[kind]

    def begin(self, start: State) -> None:
        """Note the state before the first step, which is stored whole."""
        self._remember(0, start)

    def stored(
        self, index: int, given: Callable[[], StepGradients | None], hypers: list[Hyper], state: Callable[[], State]
    ) -> State | StepGradients:
        """Return what to store of the state before step ``index``: the state itself, or what the last step got."""
        follows_stored, self._newest = self._newest == index - 1, index
        near = self._allowed and follows_stored and index - self._newest_whole < EVERY
        step = given() if near else None
        if step is None or self._proven < PROVEN:
            whole = state()
            proof = step is not None and self._leads_to(index, step, hypers, whole)
            self._remember(index, whole)
            if step is None or not proof:
                self._newest_whole = index
                return whole
        return step.copied() if self._copies else step

    def note_in_place_writes(self) -> None:
        """Note that this loop writes to its gradients in place: from the next whole state on, they are copied."""
        self._copies, self._newest = True, -1

    def _leads_to(self, index: int, given: StepGradients, hypers: list[Hyper], state: State) -> bool:
        """Recompute the step: states may be stored as gradients only if the result agrees to the last bit."""
        if self._last is None or self._last[0] != index - 1:
            return False
        self._allowed = gives_state(self._rule, self._last[1], given, hypers, state)
        self._proven += 1
        return self._allowed

    def _remember(self, index: int, state: State) -> None:
        """Hold the state for as long as the next step may have to be recomputed from it."""
        self._last = (index, state) if self._allowed and self._proven < PROVEN else None


class RecomputedStates:
    """States computed from earlier ones; the latest ones are cached, because they are requested in order.

    Backward, a block of states that follow from a whole one is computed at once, as far as it fits into ``CACHE``; for
    a large model, only its last few states are kept, and the earlier ones are computed again when it is their turn.

    Args:
        step: takes the state before step i to the one after it.
        whole: returns the index of the last state, up to a given one, that is stored whole.
        read: reads a whole state.
    """

    def __init__(
        self, step: Callable[[int, State], State], whole: Callable[[int], int], read: Callable[[int], State]
    ) -> None:
        self._step, self._whole, self._read = step, whole, read
        self._states: dict[int, State] = {}
        self._previous = -1

    def state(self, index: int) -> State:
        """Return a state that the caller may modify."""
        backward, self._previous = index < self._previous, index
        if index not in self._states:
            before = self._states.get(index - 1)
            if before is not None and not backward:
                self._states = {index: self._step(index - 1, before)}
            else:
                self._states = self._up_to(index)
        if backward:
            return self._states.pop(index)
        return {slot: {n: t.clone() for n, t in params.items()} for slot, params in self._states[index].items()}

    def _up_to(self, index: int) -> dict[int, State]:
        """Compute the states from the last whole one up to an index; return as many of the last as may be kept."""
        start = self._whole(index)
        state, states = self._read(start), dict[int, State]()
        room = max(2, CACHE // nbytes(state))
        for number in range(start, index):
            state = states[number + 1] = self._step(number, state)
            states.pop(number + 1 - room, None)
        return states
