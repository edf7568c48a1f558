"""Models that are trained side by side, as one stack or each on its own on a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from leaveout._util.trees import PARAM, Params, State, height
from leaveout.diff.operator import stacked_gradients
from leaveout.optim import AVERAGE, Hyper, Rule
from leaveout.task.batches import Batch
from leaveout.task.footprint import activation_bytes
from leaveout.task.objective import Objective
from leaveout.task.rewrites.elementary import Quicker
from leaveout.task.rewrites.products import fast_products
from leaveout.task.trace.tracer import WARM_UP
from leaveout.trajectory.twins import on_threads, twins

LARGE = 1_000_000
"""Bytes kept for a batch's backward pass above which a stack of models takes longer than a loop."""

LONG = 32 * LARGE
"""The same above which operations take so long that calling them costs little, and a trace pays off late."""

MANY = 256
"""The number of gradients after which the trace of such a model pays off."""


class Stack:
    """The states of models trained side by side; models that are still identical share one state.

    A model is identical to the last row's until the first step at which its weights differ; until then it need not be
    computed. The last row's model comes first, then the others in the order in which they diverged from it.

    Args:
        start: the state that all begin with.
        count: how many models there are.
        rule: the optimizer's step.
        steps: how many steps each of them takes, if that is known: where there will be many, tracing pays at once.
    """

    def __init__(self, start: State, count: int, rule: Rule, steps: int = 0) -> None:
        self._parts = [_each(lambda tensor: tensor[None].clone(), start)]
        self._rows = torch.tensor([count - 1], device=next(iter(start[PARAM].values())).device)
        self._count, self._rule = count, rule
        self._expected = count * steps // 2  # a model begins with the first step that uses its example
        self._steppers: dict[Objective, OneByOne | None] = {}  # None for those whose models are one stack

    def step(self, objective: Objective, weights: Tensor, batch: Batch, hypers: Sequence[Hyper]) -> int:
        """Take a step with every model, each with its row of the examples' weights; return the number of models."""
        if objective not in self._steppers:
            self._steppers[objective] = _stepper_of(objective, self.last()[PARAM], batch, self._expected)
        stepper = self._steppers[objective]
        joining = self._joining(weights)
        if stepper is None:
            state = self._joined(len(joining))
            gradients = stacked_gradients(objective, state[PARAM], weights[self._rows], batch)
            self._parts = [self._rule.steps_(state, gradients, hypers)]
        else:
            models = [*self._single_models(), *(_each(lambda t: t[:1].clone(), self._parts[0]) for _ in joining)]
            take_step = partial(self._rule.steps_, hypers=hypers)
            self._parts = stepper.stepped(models, weights[self._rows], batch, take_step)
        return len(self._rows)

    def each(self, name: str) -> Iterator[Tensor]:
        """Return the values of one parameter or buffer, for some models at a time."""
        return (part[PARAM][name] for part in self._parts)

    def last(self) -> State:
        """Return the state of the last row's model."""
        return _each(lambda tensor: tensor[0], self._parts[0])

    def rows(self) -> State:
        """Return every row's parameters, and their average if there is one, in the order of the rows."""
        place = torch.zeros(self._count, dtype=torch.int64, device=self._rows.device)
        place[self._rows] = torch.arange(len(self._rows), device=self._rows.device)
        scored = {slot: params for slot, params in self._joined().items() if slot in (PARAM, AVERAGE)}
        return _each(lambda tensor: tensor[place], scored)

    def _joining(self, weights: Tensor) -> Tensor:
        """Add and return the rows that diverge from here on, since their weights differ from the last row's."""
        if len(self._rows) == self._count:
            return self._rows[:0]
        differing = (weights != weights[-1]).any(1)
        differing[self._rows] = False
        more = differing.nonzero().flatten()
        self._rows = torch.cat([self._rows, more])
        return more

    def _joined(self, more: int = 0) -> State:
        """Return all models as one stack, with ``more`` further copies of the first."""
        if len(self._parts) == 1 and not more:
            return self._parts[0]
        first = self._parts[0]
        return {
            slot: {
                name: torch.cat([*(part[slot][name] for part in self._parts), t[:1].expand(more, *t.shape[1:])])
                for name, t in params.items()
            }
            for slot, params in first.items()
        }

    def _single_models(self) -> list[State]:
        """Return every model as a stack of one."""
        if all(height(part[PARAM]) == 1 for part in self._parts):
            return self._parts
        places = [(part, row) for part in self._parts for row in range(height(part[PARAM]))]
        return [_each(partial(torch.narrow, dim=0, start=row, length=1), part) for part, row in places]


def steps_one_by_one(objective: Objective, footprint: int) -> bool:
    """Say whether models are stepped one after the other on each of the CPU's threads, not all at once.

    All at once is faster for small models, whose operations take less time to run than to call. The choice depends only
    on the objective and on the run's first batch, so that a replay rounds alike wherever and whenever it is done.
    ``footprint`` is what a batch's forward pass keeps for its backward pass, in bytes.
    """
    # Casts inside vmap would round differently than in training.
    return objective.mode.autocast is not None or not objective.abilities.stacks or footprint > LARGE


def _stepper_of(objective: Objective, params: Params, batch: Batch, expected: int) -> OneByOne | None:
    """Return what steps an objective's models, given how many gradients are expected; None: all are stepped at once."""
    footprint = LONG + 1 if objective.mode.autocast else activation_bytes(objective, params, batch)
    if not steps_one_by_one(objective, footprint):
        return None
    traced = (
        objective.mode.autocast is None
        and objective.abilities.vmap
        and (footprint <= LONG or not objective.execution.images)
    )
    pays = WARM_UP if footprint <= LONG or expected >= 2 * MANY else MANY
    return OneByOne(twins(objective), pays if traced else None)


@dataclass(frozen=True)
class OneByOne:
    """Models stepped one at a time by each of the ``twins``, each on a thread of its own.

    ``pays`` is the number of gradients after which tracing pays off; None: never. A model's gradient and state are
    still in the cache when it takes its step; those of all models would not be.
    """

    twins: list[Objective]
    pays: int | None

    def stepped(
        self, models: list[State], weights: Tensor, batch: Batch, step: Callable[[State, Params], State]
    ) -> list[State]:
        """Take a step with every model, each a stack of one, along (1/|Z|) Σ w_z g(z)."""

        def arguments(row: int) -> tuple[Params, Tensor, Batch]:
            return {name: tensor[0] for name, tensor in models[row][PARAM].items()}, weights[row], batch

        def stepped_by(objective: Objective, row: int) -> State:
            gradient = trace(*arguments(row)) if trace else _in_range(objective, *arguments(row))
            return step(models[row], {name: tensor[None] for name, tensor in gradient.items()})

        trace = None
        if self.pays is not None:
            first = self.twins[0]
            counted = (len(weights), self.pays)
            trace = first.execution.tracer.trace(counted, "one gradient", partial(_gradient, first), *arguments(0))
        return on_threads(self.twins, stepped_by, range(len(weights)))


def _in_range(objective: Objective, params: Params, weights: Tensor, batch: Batch) -> Params:
    """Compute ḡ(θ; w), halving the recorded scale of a float16 loss as long as it overflows with these weights.

    The recorded step was taken, so a replay takes it too. Scaling by a power of two changes no digit, unless a value
    overflows or underflows.
    """
    value = _gradient(objective, params, weights, batch)
    while objective.mode.loss_scale > 1 and not all(bool(torch.isfinite(tensor).all()) for tensor in value.values()):
        objective = objective.in_mode(loss_scale=objective.mode.loss_scale / 2)
        value = _gradient(objective, params, weights, batch)
    return value


def _gradient(objective: Objective, params: Params, weights: Tensor, batch: Batch) -> Params:
    """Compute ḡ(θ; w) of one model in the fastest way; all models of a replay round alike, but not as training did."""
    with Quicker(), fast_products(params, batch):
        return objective.gradient(params, weights, batch, alone=True)


def _each(function: Callable[[Tensor], Tensor], state: State) -> State:
    return {slot: {name: function(tensor) for name, tensor in params.items()} for slot, params in state.items()}
