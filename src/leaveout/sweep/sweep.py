"""Carries vectors through the steps of a run, forward and backward.

Forward, there is one displacement per row, δ ← ∂F·δ + (what the row's examples did). Backward, there is one vector per
query, u ← ∂Fᵀ·u, which is read at every occurrence of every example; both give the same inner products ⟨u_N, δ_N⟩.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout._util.trees import PARAM, Params, State, each, embed, height, split, state_rows, zeros
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.diff.hessian import Flat, Hessian, check_symmetric
from leaveout.diff.operator import StepOperator
from leaveout.sweep import budget
from leaveout.sweep.checkpoint import SavedSweep, SweepCheckpoint
from leaveout.sweep.linear_step import LinearStep, Pulled
from leaveout.sweep.schedule import Schedule
from leaveout.sweep.stability import Growth
from leaveout.task.execution import WHOLE, Chunks
from leaveout.trajectory.left_out import LeftOut
from leaveout.trajectory.recorded_step import RecordedStep
from leaveout.trajectory.trajectory import Trajectory

CHECK_EVERY = 16
ALWAYS = Schedule()
FIRST = slice(1)


@dataclass(frozen=True)
class Sweep:
    """One way to sweep through a run: what carries the vectors, and which gradient is read.

    The resources that a sweep may use, and where its products are counted, are arguments of its methods.

    Args:
        trajectory: the run and its objective.
        kind: the curvature that carries vectors through the linearised step; with ``Flat`` they stay where they are.
        corrected: linearise each row's counterfactual step instead of the recorded one.
        schedule: where to do so, if not everywhere.
        path: a symmetric linear map that is applied to every change of a batch gradient.
    """

    trajectory: Trajectory
    kind: type[StepOperator] = Hessian
    corrected: bool = False
    schedule: Schedule = ALWAYS
    path: Callable[[Params], Params] | None = None

    @property
    def curved(self) -> bool:
        """Say whether vectors move with the steps."""
        return self.kind is not Flat

    def displacements(self, left_out: LeftOut, resources: Resources, cost: Cost) -> State:
        """Compute δ_N for every row: forward, one vector per row."""
        moved = zeros(self.trajectory.initial(), len(left_out))
        for _, moved in self.course(left_out, resources, cost):  # noqa: B007 - the last one counts
            pass
        return moved

    def course(self, left_out: LeftOut, resources: Resources, cost: Cost) -> Iterator[tuple[RecordedStep, State]]:
        """Yield each step, from the first, with the displacements δ of all rows after it."""
        moved = zeros(self.trajectory.initial(), len(left_out))
        growth = Growth(self.trajectory.objective, steady=True)
        chunks = Chunks(budget.chunk(resources, self.trajectory, len(left_out)))
        for recorded in resources.track(self.trajectory.forward(), len(self.trajectory), "forward"):
            step = self.step(recorded, chunks)
            pairs = left_out.pairs(recorded.record.ids)
            keep = self.schedule.kept(recorded.record, left_out, pairs[0])
            self.count(cost, len(left_out))
            if not self.curved:
                if self.trajectory.run.averaged:
                    moved = self.trajectory.rule.push_average(moved, recorded.record.hypers)
                pushed = step.inject(pairs, len(left_out))
                moved = {slot: each(torch.add, moved[slot], pushed.state[slot]) for slot in moved}
            else:
                pushed = step.push_corrected(moved, pairs, keep) if self.corrected else step.push(moved, pairs)
                moved = pushed.state
            self._check(recorded, step, pushed.gradient)
            growth.note(recorded, moved)
            yield recorded, moved
        growth.warn()

    def inner_products(
        self, left_out: LeftOut, queries: Params, resources: Resources, cost: Cost
    ) -> Float[Tensor, "rows queries"]:
        """Compute ⟨u_q, δ_r⟩ for every row and query vector, backward."""
        if not self.corrected:
            return self._shared(left_out, queries, resources, cost)
        size = resources.chunk(2 * budget.forward_bytes(self.trajectory), len(left_out))
        parts = list(left_out.chunks(size))
        columns = [
            torch.cat([self._private(part, each(lambda t: t[0], query), resources, cost) for part in parts])
            for query in split(queries, 1)
        ]
        return torch.stack(columns, dim=1)

    def pulled(
        self, queries: Params, resources: Resources, cost: Cost, saved: SavedSweep | None = None
    ) -> Iterator[tuple[RecordedStep, Pulled]]:
        """Carry the query vectors backward: yield each step, from the last, with what reaches it."""
        passage = self.passage(queries, saved)
        chunks = budget.chunks(resources, self.trajectory, height(queries))
        for recorded in self.backward(resources, saved):
            pulled = self.step(recorded, chunks).pull(passage.vectors)
            passage.leave(recorded, pulled, cost)
            yield recorded, pulled
        passage.growth.warn()

    def passage(self, queries: Params, saved: SavedSweep | None = None) -> Passage:
        """Return the query vectors at the end of the run, or where a saved sweep stopped."""
        vectors = saved.vectors if saved else embed(queries, self.trajectory.final(), self.trajectory.slot)
        return Passage(self, vectors, Growth(self.trajectory.objective))

    def backward(self, resources: Resources, saved: SavedSweep | None = None) -> Iterator[RecordedStep]:
        """Yield the steps from the last to the first, or those before a saved one."""
        steps = self.trajectory.backward(saved.step if saved else None)
        return resources.track(steps, len(self.trajectory), "backward")

    def onward(self, recorded: RecordedStep, pulled: Pulled) -> State:
        """Return the vectors that reach the previous step; without curvature, only averages change them."""
        if self.curved:
            return pulled.state
        averaged = self.trajectory.run.averaged
        return (
            self.trajectory.rule.pull_average(pulled.arriving, recorded.record.hypers) if averaged else pulled.arriving
        )

    def check(self, recorded: RecordedStep, pulled: Pulled) -> None:
        """Check a step in full if its gradient is known; and along the first vector, where that costs nothing."""
        self._check(recorded, pulled.step, pulled.gradient)
        if self._seen_along and (height(pulled.arriving[PARAM]) == 1 or pulled.gradient is None):
            self._check_along(recorded, pulled)

    def _check_along(self, recorded: RecordedStep, pulled: Pulled) -> None:
        check, slope = self.trajectory.check, float(pulled.reads[0].sum())
        if self.trajectory.rule.linear:
            arriving, carried = (state_rows(state, FIRST) for state in (pulled.arriving, pulled.carried))
            check.along(recorded, arriving, carried, slope)
        elif pulled.gradient is None and pulled.step.consumed is not None:
            check.slope(recorded, each(lambda t: t[0], pulled.along), pulled.step.consumed, slope)

    @property
    def _rough(self) -> bool:
        """Say whether the gradient at hand is not the one the step was taken with, or is not linear in the weights."""
        return self.trajectory.trained.mode.autocast is not None or self.trajectory.objective.coupled

    @property
    def _seen_along(self) -> bool:
        """Say whether a step can be checked along one vector: the gradient must be linear in the weights."""
        return self.path is None and not self._rough

    def _shared(
        self, left_out: LeftOut, queries: Params, resources: Resources, cost: Cost
    ) -> Float[Tensor, "rows queries"]:
        """Carry one vector per query for all rows: −(∂F/∂w_k)ᵀu is added to k's row at each of its occurrences."""
        checkpoint = SweepCheckpoint(resources.checkpoint, cost, self.trajectory.objective.device)
        saved = checkpoint.saved()
        fresh = next(iter(queries.values())).new_zeros((len(left_out), height(queries)))
        totals = saved.gathered["totals"] if saved else fresh
        for recorded, pulled in self.pulled(queries, resources, cost, saved):
            pulled.add_to(totals, left_out.pairs(recorded.record.ids))
            checkpoint.note(recorded.record.index, self.onward(recorded, pulled), lambda: {"totals": totals})
        return totals

    def _private(self, left_out: LeftOut, query: Params, resources: Resources, cost: Cost) -> Float[Tensor, " rows"]:
        """Carry one vector per row, u + e_k: the shared vector plus the row's own remainder."""
        check_symmetric(self.trajectory.objective, self.kind)
        count = len(left_out)
        stacked = {name: tensor.expand(count, *tensor.shape) for name, tensor in query.items()}
        vectors = embed(stacked, self.trajectory.final(), self.trajectory.slot)
        total = next(iter(query.values())).new_zeros(count)
        growth = Growth(self.trajectory.objective)
        chunks = Chunks(budget.chunk(resources, self.trajectory, count))
        for recorded in self.backward(resources):
            step = self.step(recorded, chunks)
            pairs = left_out.pairs(recorded.record.ids)
            keep = self.schedule.kept(recorded.record, left_out, pairs[0])
            self.count(cost, count)
            (vectors, gradient), reads = step.pull_corrected(vectors, pairs, keep)
            total += reads
            self._check(recorded, step, gradient)
            growth.note(recorded, vectors)
        growth.warn()
        return total

    def step(self, recorded: RecordedStep, chunks: Chunks = WHOLE) -> LinearStep:
        """Return a recorded step, linearised."""
        operator = self.kind(recorded.objective.chunked(chunks), recorded.params, recorded.batch)
        return LinearStep(self.trajectory.rule, recorded, operator, self.path)

    def _check(self, recorded: RecordedStep, step: LinearStep, gradient: Params | None) -> None:
        """Recompute every step whose gradient is known; of the others, some, including the first and the last."""
        index = recorded.record.index
        cast = self.trajectory.trained.mode.autocast is not None
        if (gradient is not None and not cast) or index % CHECK_EVERY == 0 or index == len(self.trajectory) - 1:
            check = self.trajectory.check
            check.step(recorded, check.recomputed(recorded, recorded.params) if cast else step.after(gradient))

    def count(self, cost: Cost, vectors: int) -> None:
        """Count what a step costs."""
        cost.gradients += 1
        if self.curved:
            cost.hvps += vectors


@dataclass
class Passage:
    """Query vectors on their way back through a run."""

    sweep: Sweep
    vectors: State
    growth: Growth

    def leave(self, recorded: RecordedStep, pulled: Pulled, cost: Cost) -> None:
        """Check the step that the vectors were pulled through, and go on to the previous one."""
        self.sweep.count(cost, height(pulled.along))
        self.sweep.check(recorded, pulled)
        self.vectors = self.sweep.onward(recorded, pulled)
        if self.sweep.curved:
            self.growth.note(recorded, self.vectors)
