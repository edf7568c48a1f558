"""Finds out which forms of second derivative are correct for an objective, on some of its examples.

PyTorch has many formulas, and a few are wrong or missing. Every form is tried and compared with finite differences of
the gradient: near the task's initial state (where gates that are zero are opened), and at a run's last state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from leaveout._util.trees import Params
from leaveout.diff.forms import CHANGES, EXAMPLE, FOLLOWING, VECTOR, VECTORS, Abilities, Form
from leaveout.diff.operator import example_gradients, gradient
from leaveout.errors import first_line
from leaveout.task.batches import leaves, pick
from leaveout.task.guard import agreement
from leaveout.task.guard.coupled import coupled_abilities
from leaveout.task.guard.culprit import culprit
from leaveout.task.guard.differences import MISSING
from leaveout.task.guard.hidden import Hidden, hidden
from leaveout.task.guard.points import Point, Trial, trial
from leaveout.task.objective import Objective
from leaveout.task.preparing import is_large
from leaveout.task.training_batch import TrainingBatch, has_shared_draws, size_of, take

NOTHING: dict[str, Any] = {
    **dict.fromkeys(("vector", "vectors", "changes", "example")),
    **dict.fromkeys(("outer", "together", "slopes", "symmetric", "slope"), False),
}
"""What cannot be computed of a function whose gradient is not its derivative."""

Check: TypeAlias = Callable[["Objective", Params, Any, Point | None], bool]


def compared(
    objective: Objective, params: Params, batch: Any, before: Abilities | None = None
) -> tuple[str | None, Abilities]:
    """Return a problem that no method can handle, or the task's abilities at this state and near it.

    With ``before``, only the abilities it had are tried, at the state itself first. Examples without a second
    derivative there, which no form can compute, are not compared on: a sweep names them.
    """
    found = _compared(objective, params, batch, before)
    if (found[0] is None and found[1].vector) or has_shared_draws(batch):
        return found
    smooth = [i for i in range(size_of(batch)) if _is_smooth(objective, params, _plain(batch), i)]
    if len(smooth) in (0, size_of(batch)):
        return found
    index = torch.tensor(smooth, device=leaves(batch)[0].device)
    return _compared(objective, params, take(batch, index), before)


def _plain(batch: Any) -> Any:
    return batch.batch if isinstance(batch, TrainingBatch) else batch


def _is_smooth(objective: Objective, params: Params, batch: Any, i: int) -> bool:
    """Say whether the gradient of an example's loss, in evaluation mode, has a finite derivative along ones."""
    tracked = {name: tensor.detach().requires_grad_() for name, tensor in params.items() if name in objective.names}
    try:
        with torch.enable_grad():
            loss = objective.example_loss({**params, **tracked}, pick(batch, i))
            slope = torch.autograd.grad(loss, list(tracked.values()), create_graph=True, materialize_grads=True)
            along = torch.stack([part.sum() for part in slope]).sum()
            bent = torch.autograd.grad(along, list(tracked.values()), materialize_grads=True)
    except Exception:  # noqa: BLE001 - what cannot be computed at all is another problem
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in bent)


def _compared(
    objective: Objective, params: Params, batch: Any, before: Abilities | None = None
) -> tuple[str | None, Abilities]:
    """Do the same on all of the examples."""
    if isinstance(batch, TrainingBatch) and (objective.coupled or batch.whole):
        return coupled_abilities(objective, params, batch, before)
    tested = trial(objective, params, batch, near=before is None)
    problem = tested.problem or _untransformed(objective, params, batch)
    if problem:
        return problem, Abilities()
    found = hidden(tested.objective, tested.at, tested.batch)
    abilities = _Search(objective, params, batch, tested, found).abilities(before)
    if found.own or (found.stops and not abilities.symmetric):
        abilities = abilities._replace(reason=found.own or found.stops)
    elif before is not None and before.reason:
        abilities = abilities._replace(reason=before.reason)
    elif not (abilities.whole and abilities.symmetric):
        abilities = abilities._replace(reason=culprit(tested.objective, tested.at, tested.batch))
    return None, abilities


def tried(objective: Objective, params: Params, batch: Any) -> tuple[str | None, Abilities]:
    """Return the task's abilities, tried but not compared."""
    if problem := _untransformed(objective, params, batch):
        return problem, Abilities()
    tested = Trial(objective.untraced(), batch, params)
    found = hidden(tested.objective, params, batch)
    abilities = _Search(objective, params, batch, tested, found).abilities(None)
    return None, abilities._replace(reason=found.own or found.stops)


def _untransformed(objective: Objective, params: Params, batch: Any) -> str | None:
    """Return the problem with a model that ``torch.func`` cannot differentiate even once."""
    quiet = objective.untraced().able(Abilities())
    try:
        gradient(quiet, params, batch)
        example_gradients(quiet, params, batch)
    except Exception as error:  # noqa: BLE001 - PyTorch and the model may raise anything; it is reported as a problem
        return (
            f"torch.func cannot take its gradient ({first_line(error)}); write the operation with PyTorch's own "
            "functions, or give an autograd.Function a setup_context and generate_vmap_rule = True"
        )
    return None


class _Search:
    """The forms of each kind in order of preference, tried until one is correct."""

    def __init__(self, objective: Objective, params: Params, batch: Any, tested: Trial, found: Hidden) -> None:
        self.found = found
        self.objective, self.batch, self.point = tested.objective, tested.batch, tested.point
        # A form that is correct in float64 must also run in the task's own dtype; float32 has all of float64's kernels.
        dtype = next(iter(params.values())).dtype
        covered = self.point is not None and tested.objective.is_wide and dtype in (torch.float32, torch.float64)
        self.original = None if covered else (objective.untraced(), params, batch)
        self.result = Abilities(vmap=True, stacks=True, forward=True, outer=True)

    def abilities(self, before: Abilities | None) -> Abilities:
        """Return what works and is correct.

        A large model is compared with fewer passes. One vector's product counts as correct if it is correct together
        with every example's gradient; and a kind that differs from another one only in the axis of ``vmap`` keeps its
        result from ``before`` if the other kind has the same result as before.
        """
        large = is_large(self.objective)
        brief = before if large else None
        self._switch("vmap", agreement.examples, before)
        if not self._as_before(brief, "vmap", "stacks"):
            self._switch("stacks", agreement.models, before)
        self._switch("symmetric", self._symmetric, before)
        stopped = bool(self.found.stops) or (before is not None and before.hidden)
        self._set("hidden", stopped)
        if stopped:
            self._set("slopes", False)
        else:
            self._switch("slopes", agreement.weights, before)
        if self.result.slopes:
            self._set("reads", True)  # they are used where slopes cannot be
        else:
            self._switch("reads", agreement.weights, before)
        self._choose_changes(before)
        # Without a comparison, the form that is most often wrong is not used.
        vector = self._following(VECTOR if self.point else VECTOR[1:])
        self._set("vector", before.vector if before and not stopped else vector[0])
        if not (large and self._joint(before)):
            self._choose("vector", vector, agreement.vector, before)
            self._joint(before)
        self._choose("vectors", VECTORS, agreement.vectors, before)
        if not (self.result.symmetric and self._as_before(brief, "changes", "example")):
            self._choose("example", EXAMPLE if self.result.symmetric else (), agreement.example, before)
        if not (self.result.slopes and self._as_before(brief, "slopes", "forward", "outer")):
            self._try([{"forward": True}, {"forward": False}, {"outer": False}][stopped:], agreement.outer)
        self._try([{"stops": False}, {"stops": True}, {"slope": False}][stopped:], agreement.slope)
        own = self.found.own or (before is not None and not (before.vector or before.slope))
        return self.result._replace(**NOTHING) if own else self.result

    def _choose_changes(self, before: Abilities | None) -> None:
        """Choose the form of J·v, by which the others are measured; it may show that J is not symmetric."""
        symmetric = self.result.symmetric
        for taken in dict.fromkeys((symmetric, False)):
            self._set("symmetric", taken)
            self._choose("changes", CHANGES, agreement.changes, before)
            if self.result.changes is not None:
                return
        self._set("symmetric", symmetric)

    def _joint(self, before: Abilities | None) -> bool:
        """Say whether one vector's product can be computed together with every example's gradient."""
        self._set("together", False)
        if self.result.vector is Form.REVERSE_FORWARD and self.result.vmap:
            self._switch("together", agreement.together, before)
        return self.result.together

    def _as_before(self, before: Abilities | None, like: str, *names: str) -> bool:
        """Copy these from an earlier comparison, if there is one and the ability they are ``like`` is unchanged."""
        if before is None or getattr(self.result, like) != getattr(before, like):
            return False
        for name in names:
            self._set(name, getattr(before, name))
        return True

    def _symmetric(self, _task: Objective, _at: Params, _batch: Any, point: Point | None) -> bool:
        return not self.found.elsewhere and (point is None or point.difference.symmetric)

    def _switch(self, name: str, check: Check, before: Abilities | None) -> None:
        """Set an ability that is there or not; it is tried unless it was missing before."""
        if before is not None and not getattr(before, name):
            self._set(name, False)
        else:
            self._set(name, True)
            self._set(name, self._is_right(check))

    def _choose(self, kind: str, order: Sequence[Form], check: Check, before: Abilities | None) -> None:
        """Set the first form that is correct, from the one chosen before; None if none is."""
        for form in self._following(_later(order, getattr(before, kind)) if before else order):
            self._set(kind, form)
            if self._is_right(check):
                return
        self._set(kind, None)

    def _try(self, choices: Sequence[dict[str, bool]], check: Check) -> None:
        """Choose the first of these settings that is correct, or else the last."""
        for choice in choices:
            for name, value in choice.items():
                self._set(name, value)
            if choice is choices[-1] or self._is_right(check):
                return

    def _following(self, order: Sequence[Form]) -> Sequence[Form]:
        """Return the forms that are right even if gradients are stopped with an effect on other examples only."""
        return [form for form in order if form in FOLLOWING] if self.result.hidden else order

    def _set(self, name: str, value: Any) -> None:
        self.result = self.result._replace(**{name: value})

    def _is_right(self, check: Check) -> bool:
        """Say whether it runs, in float64 and in the task's own dtype, and is correct at the point."""
        try:
            able = self.objective.able(self.result)
            if self.point is not None and not check(able, self.point.at, self.batch, self.point):
                return False
            if self.original is not None:
                objective, params, batch = self.original
                check(objective.able(self.result), params, batch, None)
        except MISSING:
            return False
        return True


def _later(order: Sequence[Form], first: Form | None) -> Sequence[Form]:
    return order[order.index(first) if first in order else 0 :] if first is not None else ()
