"""Whether a recorded step follows from its batch and the task."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout._util.trees import PARAM, Params, State, distance, each, norm
from leaveout.errors import MismatchError
from leaveout.optim import Rule
from leaveout.task.derivatives import gradient
from leaveout.task.task import Task
from leaveout.trajectory.recorded_step import Moment

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""How far a recomputed step may lie from the recorded one, relative to its length; rounding stays far below."""

DRAWS, NOISE = 16, 16
"""How often parameters are moved to see what rounding can do, and by how many units of their last place."""


class StepCheck:
    """Refuses steps that do not follow from their batch and the task.

    A step follows if, computed again, it ends within a tolerance of its length from the recorded state. Where it does
    not, it is taken from parameters moved by as little as rounding would move them: a ReLU whose input is zero up to
    rounding was on or off by chance, and the gradient jumps with it. What such a jump explains is no mismatch.
    """

    def __init__(self, rule: Rule, task: Task) -> None:
        self._rule, self._task = rule, task

    def step(self, moment: Moment, predicted: State, travelled: float | None = None) -> None:
        """``‖predicted − recorded‖ ≤ tolerance · length of the step``, plus what rounding can do.

        With ``travelled``, the length of that way instead: for states that were computed one from the other.
        """
        strayed = _strayed(moment, predicted, travelled)
        if strayed is not None and (travelled is not None or strayed > self._jump(moment)):
            raise _does_not_follow(moment, strayed)

    def way(self, moment: Moment, predicted: State, travelled: float) -> float | None:
        """The same for a model that takes the run's steps on its own way.

        Rounding can grow on such a way until the model has left the recorded one. Then the step is taken once more,
        from the recorded state. If it follows, nothing is wrong but rounding, and how far that has led is given, as a
        share of the way travelled.
        """
        strayed = _strayed(moment, predicted, travelled)
        if strayed is not None:
            self.step(moment, self._taken(moment, moment.params))
        return strayed

    def along(self, moment: Moment, vector: State, carried: State, slope: float) -> None:
        """A step of a linear rule, seen along one vector u, at no extra cost.

        ``⟨u, s'⟩ = ⟨Aᵀu, s⟩ + ⟨(∂O/∂g)ᵀu, ḡ⟩`` holds for every u; ``slope`` is the last term, computed again.
        """
        if not moment.exact:
            return
        before, after = _flat(moment.before), _flat(moment.after)
        u = _flat(vector)
        recorded = float(u @ after - _flat(carried) @ before)
        size, length = float(u.norm()), float((after - before).norm())
        missed = abs(recorded - slope)
        if _is_small(moment, missed / max(size, 1e-300), length):
            return
        strayed = missed / max(size * length, 1e-300)
        if missed != missed or strayed > self._jump(moment):
            raise _does_not_follow(moment, strayed)

    def _taken(self, moment: Moment, params: Params) -> State:
        """The step with the gradient at these parameters."""
        return self._rule.step(moment.before, gradient(self._task, params, moment.batch), moment.record.hypers)

    def _jump(self, moment: Moment) -> float:
        """How far apart, in lengths of the step, it can end by rounding of its parameters alone."""
        order = torch.Generator().manual_seed(0)

        def moved(tensor: Tensor) -> Tensor:
            noise = torch.randn(tensor.shape, generator=order, dtype=tensor.dtype).to(tensor.device)
            return tensor * (1 + NOISE * torch.finfo(tensor.dtype).eps * noise)

        ends = [self._taken(moment, each(moved, moment.params))[PARAM] for _ in range(DRAWS)]
        apart = max(distance(end, ends[0]) for end in ends)
        return 2 * apart / max(distance(moment.after[PARAM], moment.before[PARAM]), 1e-300)


def _is_small(moment: Moment, missed: float, length: float) -> bool:
    """Whether it is within the tolerance of that length, and what rounding of the parameters may add."""
    dtype = next(iter(moment.after[PARAM].values())).dtype
    share = TOLERANCE.get(dtype, 1e-2) * length
    return missed <= share or missed <= share + 64 * torch.finfo(dtype).eps * norm(moment.after[PARAM])


def _strayed(moment: Moment, predicted: State, travelled: float | None) -> float | None:
    """How far the prediction is from the recorded state, in lengths; None where that is within the tolerance."""
    if not moment.exact:
        return None
    before, after = moment.before[PARAM], moment.after[PARAM]
    missed = distance(predicted[PARAM], after)
    length = distance(after, before) if travelled is None else travelled
    if _is_small(moment, missed, length):
        return None
    if missed != missed:
        raise MismatchError(
            f"Step {moment.record.index} gives NaN when it is computed again: look at the losses of its batch's "
            f"examples {moment.record.ids.tolist()[:8]}."
        )
    return missed / max(length, 1e-300)


def _flat(state: State) -> Float[Tensor, " width"]:
    return torch.cat([tensor.flatten() for params in state.values() for tensor in params.values()]).double()


def _does_not_follow(moment: Moment, missed: float) -> MismatchError:
    return MismatchError(
        f"Step {moment.record.index} does not follow from its batch and this task: computed again it ends {missed:.2g} "
        "step lengths away from the recorded state; give the Task the loss, l2 and model that were trained, and train "
        "without gradient clipping, accumulation, mixed precision or randomness."
    )
