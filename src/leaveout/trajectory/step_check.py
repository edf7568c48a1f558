"""Checks whether a recorded step follows from its batch and the objective."""

from __future__ import annotations

from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout._util.trees import PARAM, Params, State, distance, each, norm
from leaveout.diff.operator import gradient
from leaveout.errors import MismatchError
from leaveout.optim import Rule
from leaveout.trajectory.diagnosis import REMEDY, called, diagnosis
from leaveout.trajectory.recorded_step import RecordedStep

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""How far a recomputed step may be from the recorded one, relative to its length; rounding stays far below this."""

CAST = 8
"""The same under ``torch.autocast``, in units in the last place of the dtype that was cast to."""

ADDED_UP = 10
"""How many times as far away buffers may be after many steps, each computed from the one before."""

DRAWS, NOISE = 16, 16
"""How often parameters are perturbed to see what rounding can do, and by how many units in the last place."""

Lengths: TypeAlias = dict[str, float]
"""A length for each slot of the state."""


class StepCheck:
    """Refuses steps that do not follow from their batch and the objective.

    A step follows if, when it is recomputed, every slot of the state ends within a tolerance of the recorded one: the
    parameters relative to the length of their step, ‖θ' − θ‖, and a buffer b relative to what the gradient contributed
    to it, ‖b' − O(s, 0)_b‖. If a slot does not, the step is taken from parameters perturbed as little as rounding would
    perturb them: a ReLU whose input is zero up to rounding was on or off by chance, and the gradient jumps with it. A
    difference that such a jump explains is not a mismatch.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def _of(self, recorded: RecordedStep) -> Rule:
        return self._rule.beside(recorded.params, recorded.objective.names)

    def step(self, recorded: RecordedStep, predicted: State) -> None:
        """Check ``‖predicted − recorded‖ ≤ tolerance · length`` in every slot, allowing for what rounding can do."""
        if not recorded.exact:
            return
        lengths = self._lengths(recorded)
        missed = _misses(recorded, predicted, lengths)
        if self._beyond_rounding(recorded, missed):
            words = " and ".join(
                f"{called(slot)} {missed[slot] / max(lengths[slot], 1e-300):.2g} "
                f"{'step lengths' if slot == PARAM else 'times what the step brought to it'} away"
                for slot in missed
            )
            used = gradient(recorded.trained, recorded.params, recorded.batch)
            raise MismatchError(
                f"Step {recorded.record.index} does not follow from its batch and this task: computed again it ends "
                f"with {words} from what was recorded. {diagnosis(self._of(recorded), recorded, used)}",
                code="step-does-not-follow",
            )

    def arrival(self, recorded: RecordedStep, predicted: State, travelled: float) -> None:
        """Check the same for the last of several steps, computed one from the other, that travelled this distance."""
        if not recorded.exact:
            return
        sizes = _sizes(recorded, travelled)
        missed = _misses(recorded, predicted, sizes, ADDED_UP)
        if PARAM in missed or self._beyond_rounding(recorded, missed):
            words = " and ".join(
                f"{called(slot)} {missed[slot] / max(sizes[slot], 1e-300):.2g} of "
                f"{'the way' if slot == PARAM else 'its size'} away"
                for slot in missed
            )
            raise MismatchError(
                f"Step {recorded.record.index} does not follow from its batch and this task, or one of the steps since "
                f"the last state that was kept: computed again from there, they end with {words} from what was "
                f"recorded. {REMEDY} A run that keeps all states, keep='all', tells which step it is and why.",
                code="step-does-not-follow",
            )

    def drift(self, recorded: RecordedStep, predicted: State, travelled: float) -> float | None:
        """Check the same for a model that takes the run's steps from its own states; return how far it has drifted.

        Rounding errors can grow until the model has left the recorded run. Then the step is taken once more, from the
        recorded state. If it follows in every slot, rounding is the only cause; what is returned is how far it has
        moved the parameters, as a share of the distance travelled.
        """
        if not recorded.exact:
            return None
        missed = _misses(recorded, predicted, _sizes(recorded, travelled), ADDED_UP)
        if missed:
            self.step(recorded, self.recomputed(recorded, recorded.params))
        return missed[PARAM] / max(travelled, 1e-300) if PARAM in missed else None

    def along(self, recorded: RecordedStep, vector: State, carried: State, slope: float) -> None:
        """Check a step of a linear rule along one vector u, at no extra cost.

        ``⟨u, s'⟩ = ⟨Aᵀu, s⟩ + ⟨(∂O/∂g)ᵀu, ḡ⟩`` holds for every u; ``slope`` is the last term, recomputed. If it does
        not hold, the whole step is recomputed: one vector alone does not show how far away it ends.
        """
        if not recorded.exact:
            return
        before, after = _flat(recorded.before), _flat(recorded.after)
        u = _flat(vector)
        observed = float(u @ after - _flat(carried) @ before)
        size, length = float(u.norm()), float((after - before).norm())
        missed = abs(observed - slope) / max(size, 1e-300)
        self._along(recorded, missed, length, _allowed(recorded, PARAM, length))

    def slope(self, recorded: RecordedStep, vector: Params, used: Params, slope: float) -> None:
        """Check the same for any rule, if the recorded states determine which gradient ḡ was ``used``.

        ``slope`` is ⟨a, ḡ⟩ along a vector a, recomputed. A gradient that was read off a buffer has its rounding.
        """
        if not recorded.exact:
            return
        size, length = _length(vector), _length(used)
        observed = float(sum(torch.dot(vector[name].flatten(), used[name].flatten()) for name in used))
        dtype = next(iter(used.values())).dtype
        held = sum(_length(params) for slot, params in recorded.after.items() if slot != PARAM)
        allowed = _tolerance(recorded, dtype) * length + 1024 * torch.finfo(dtype).eps * held
        self._along(recorded, abs(observed - slope) / max(size, 1e-300), length, allowed)

    def _along(self, recorded: RecordedStep, missed: float, length: float, allowed: float) -> None:
        """Recompute the whole step if it is off along a vector by more than is allowed."""
        if missed <= allowed:
            return
        self.step(recorded, self.recomputed(recorded, recorded.params))
        apart = self._apart(recorded, dict.fromkeys(recorded.after, missed))
        if not missed <= 2 * sum(apart.values()) + ADDED_UP * allowed:
            raise MismatchError(
                f"Step {recorded.record.index} follows from its batch's gradient, but the examples' derivatives along "
                f"the query vector do not add up to that gradient (by {missed / max(length, 1e-300):.2g} step lengths):"
                " the model or the loss stops gradients somewhere or has a wrong derivative; score with Replay().",
                code="derivatives-do-not-add-up",
            )

    def recomputed(self, recorded: RecordedStep, params: Params) -> State:
        """Take the step with the gradient at these parameters."""
        value = gradient(recorded.trained, params, recorded.batch)
        return self._of(recorded).step(recorded.before, value, recorded.record.hypers)

    def _lengths(self, recorded: RecordedStep) -> Lengths:
        """Measure how far the step moved the parameters, and what the gradient contributed to each buffer."""
        moved = {PARAM: distance(recorded.after[PARAM], recorded.before[PARAM])}
        if len(recorded.after) > 1:
            nothing = each(torch.zeros_like, recorded.before[PARAM])
            without = self._of(recorded).step(recorded.before, nothing, recorded.record.hypers)
            moved |= {slot: distance(without[slot], recorded.after[slot]) for slot in without if slot != PARAM}
        return moved

    def _beyond_rounding(self, recorded: RecordedStep, missed: Lengths) -> bool:
        if not missed:
            return False
        apart = self._apart(recorded, missed)
        return any(missed[slot] > 2 * apart[slot] for slot in missed)

    def _apart(self, recorded: RecordedStep, missed: Lengths) -> Lengths:
        """Measure how far apart the slots can end by rounding of the parameters alone, in as few draws as needed."""
        order = torch.Generator().manual_seed(0)

        def moved(tensor: Tensor) -> Tensor:
            noise = torch.randn(tensor.shape, generator=order, dtype=tensor.dtype).to(tensor.device)
            return tensor * (1 + NOISE * torch.finfo(tensor.dtype).eps * noise)

        first = self.recomputed(recorded, each(moved, recorded.params))
        apart = dict.fromkeys(missed, 0.0)
        for _ in range(DRAWS - 1):
            end = self.recomputed(recorded, each(moved, recorded.params))
            apart = {slot: max(apart[slot], distance(end[slot], first[slot])) for slot in missed}
            if all(missed[slot] <= 2 * apart[slot] for slot in missed):
                break
        return apart


def _misses(recorded: RecordedStep, predicted: State, lengths: Lengths, times: int = 1) -> Lengths:
    """Measure how far the prediction is from the recorded state, for the slots where that exceeds the tolerance."""
    missed: Lengths = {}
    for slot, params in recorded.after.items():
        missed[slot] = distance(predicted[slot], params)
        if missed[slot] != missed[slot]:
            raise MismatchError(
                f"Step {recorded.record.index} gives NaN when it is computed again: look at the losses of its batch's "
                f"examples {recorded.record.ids.tolist()[:8]}.",
                code="step-recomputed-nan",
            )
    tolerated = {slot: 1 if slot == PARAM else times for slot in missed}
    return {s: m for s, m in missed.items() if m > 0 and m > tolerated[s] * _allowed(recorded, s, lengths[s])}


def _sizes(recorded: RecordedStep, travelled: float) -> Lengths:
    """Return what accumulated deviations are relative to: the parameters' distance travelled, the buffers' norms."""
    return {slot: travelled if slot == PARAM else norm(params) for slot, params in recorded.after.items()}


def _allowed(recorded: RecordedStep, slot: str, length: float) -> float:
    """Return the tolerance for that length, plus what rounding of the slot may add."""
    dtype = next(iter(recorded.after[slot].values())).dtype
    tolerance = _tolerance(recorded, dtype)
    return tolerance * length + 64 * torch.finfo(dtype).eps * norm(recorded.after[slot])


def _tolerance(recorded: RecordedStep, dtype: torch.dtype) -> float:
    """Return the tolerance for states of a dtype: that of 16 bits if the forward pass computes in these.

    It does under ``torch.autocast``, and where frozen weights are narrower than the trained ones (adapters).
    """
    narrow = recorded.trained.mode.autocast
    if narrow is None and dtype in TOLERANCE:
        kinds = {param.dtype for param in recorded.trained.model.parameters()} & {torch.bfloat16, torch.float16}
        narrow = max(kinds, key=lambda kind: torch.finfo(kind).eps, default=None)
    if narrow is None:
        return TOLERANCE.get(dtype, 1e-2)
    return max(TOLERANCE[torch.float32], CAST * torch.finfo(narrow).eps)


def _flat(state: State) -> Float[Tensor, " width"]:
    return torch.cat([tensor.flatten() for params in state.values() for tensor in params.values()]).double()


def _length(params: Params) -> float:
    return float(torch.stack(torch._foreach_norm(list(params.values()))).norm())
