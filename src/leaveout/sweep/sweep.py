"""Carries vectors through the steps of a run, forward and backward.

Forward, there is one displacement per row, δ ← ∂F·δ + (what the row's examples did). Backward, there is one vector per
query, u ← ∂Fᵀ·u, which is read at every occurrence of every example; both give the same inner products ⟨u_N, δ_N⟩.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout._util.trees import Params, State, each, embed, height, split, state_rows, zeros
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.sweep import budget
from leaveout.sweep.checkpoint import SavedSweep, SweepCheckpoint
from leaveout.sweep.curvature import Curvature, Flat, Hessian, check_symmetric
from leaveout.sweep.linear_step import LinearStep, Pulled
from leaveout.sweep.schedule import Schedule
from leaveout.sweep.stability import Growth
from leaveout.trajectory.left_out import LeftOut
from leaveout.trajectory.recorded_step import RecordedStep
from leaveout.trajectory.trajectory import Trajectory

CHECK_EVERY = 16
ALWAYS = Schedule()
FIRST = slice(1)


Products: TypeAlias = Callable[[RecordedStep, Curvature, Params], tuple[Params, Float[Tensor, "vectors batch"]]]
"""What an observer of the backward sweep gives in place of ``curvature.products(vectors)`` at a recorded step."""


@dataclass(frozen=True)
class Sweep:
    """One way to sweep through a run: what carries the vectors, and which gradient is read.

    The resources that a sweep may use, and where its products are counted, are arguments of its methods.

    Args:
        trajectory: the run and its task.
        kind: the curvature that carries vectors through the linearised step; with ``Flat`` they stay where they are.
        corrected: linearise each row's counterfactual step instead of the recorded one.
        schedule: where to do so, if not everywhere.
        path: a symmetric linear map that is applied to every change of a batch gradient.
    """

    trajectory: Trajectory
    kind: type[Curvature] = Hessian
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
        growth = Growth(self.trajectory.task, steady=True)
        chunk = budget.chunk(resources, self.trajectory, len(left_out))
        for recorded in resources.track(self.trajectory.forward(), len(self.trajectory), "forward"):
            step = self._step(recorded, chunk)
            pairs = left_out.pairs(recorded.record.ids)
            keep = self.schedule.kept(recorded.record, left_out, pairs[0])
            self._count(cost, len(left_out))
            if not self.curved:
                if self.trajectory.run.averaged:
                    moved = self.trajectory.rule.push_average(moved, recorded.record.hypers)
                jump = step.inject(pairs, len(left_out))
                moved = {slot: each(torch.add, moved[slot], jump[slot]) for slot in moved}
            elif self.corrected:
                moved = step.push_corrected(moved, pairs, keep)
            else:
                moved = step.push(moved, pairs)
            self._check(recorded, step)
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
        self,
        queries: Params,
        resources: Resources,
        cost: Cost,
        saved: SavedSweep | None = None,
        products: Products | None = None,
    ) -> Iterator[tuple[RecordedStep, Pulled]]:
        """Carry the query vectors backward: yield each step, from the last, with what reaches it.

        ``products`` is an observer that provides each step's products, since it has them from elsewhere, and stays
        within the budget on its own.
        """
        vectors = saved.vectors if saved else embed(queries, self.trajectory.final(), self.trajectory.slot)
        growth, count = Growth(self.trajectory.task), height(queries)
        chunk = None if products else budget.chunk(resources, self.trajectory, count)
        examples = None if products else budget.examples(resources, self.trajectory)
        threads = None if products else budget.threads(resources, self.trajectory, count)
        recorded_steps = self.trajectory.backward(saved.step if saved else None)
        for recorded in resources.track(recorded_steps, len(self.trajectory), "backward"):
            self._count(cost, count)
            step = self._step(recorded, chunk, examples, threads)
            pulled = step.pull(vectors, products and partial(products, recorded, step.curvature))
            self._check(recorded, step)
            if (count == 1 or not step.has_gradient) and not products and self._seen_along:
                self._check_along(recorded, pulled)
            vectors = self.onward(recorded, pulled)
            if self.curved:
                growth.note(recorded, vectors)
            yield recorded, pulled
        growth.warn()

    def onward(self, recorded: RecordedStep, pulled: Pulled) -> State:
        """Return the vectors that reach the previous step; without curvature, only averages change them."""
        if self.curved:
            return pulled.state
        averaged = self.trajectory.run.averaged
        return (
            self.trajectory.rule.pull_average(pulled.arriving, recorded.record.hypers) if averaged else pulled.arriving
        )

    def _check_along(self, recorded: RecordedStep, pulled: Pulled) -> None:
        """Check a step along the first vector that is pulled back, where that costs nothing."""
        check, slope = self.trajectory.check, float(pulled.weights[0].sum())
        if self.trajectory.rule.linear:
            arriving, carried = (state_rows(state, FIRST) for state in (pulled.arriving, pulled.carried))
            check.along(recorded, arriving, carried, slope)
        elif not pulled.step.has_gradient and pulled.step.consumed is not None:
            check.slope(recorded, each(lambda t: t[0], pulled.gradient), pulled.step.consumed, slope)

    @property
    def _rough(self) -> bool:
        """Say whether the gradient at hand is not the one the step was taken with, or is not linear in the weights."""
        return self.trajectory.trained.autocast is not None or self.trajectory.task.coupled

    @property
    def _seen_along(self) -> bool:
        """Say whether a step can be checked along one vector: the gradient must be linear in the weights."""
        return self.path is None and not self._rough

    def _shared(
        self, left_out: LeftOut, queries: Params, resources: Resources, cost: Cost
    ) -> Float[Tensor, "rows queries"]:
        """Carry one vector per query for all rows: −(∂F/∂w_k)ᵀu is added to k's row at each of its occurrences."""
        checkpoint = SweepCheckpoint(resources.checkpoint, cost, self.trajectory.task.device)
        saved = checkpoint.saved()
        fresh = next(iter(queries.values())).new_zeros((len(left_out), height(queries)))
        totals = saved.gathered["totals"] if saved else fresh
        for recorded, pulled in self.pulled(queries, resources, cost, saved):
            pulled.add_to(totals, left_out.pairs(recorded.record.ids))
            checkpoint.note(recorded.record.index, self.onward(recorded, pulled), lambda: {"totals": totals})
        return totals

    def _private(self, left_out: LeftOut, query: Params, resources: Resources, cost: Cost) -> Float[Tensor, " rows"]:
        """Carry one vector per row, u + e_k: the shared vector plus the row's own remainder."""
        check_symmetric(self.trajectory.task, self.kind)
        count = len(left_out)
        stacked = {name: tensor.expand(count, *tensor.shape) for name, tensor in query.items()}
        vectors = embed(stacked, self.trajectory.final(), self.trajectory.slot)
        total = next(iter(query.values())).new_zeros(count)
        growth = Growth(self.trajectory.task)
        chunk = budget.chunk(resources, self.trajectory, count)
        for recorded in resources.track(self.trajectory.backward(), len(self.trajectory), "backward"):
            step = self._step(recorded, chunk)
            pairs = left_out.pairs(recorded.record.ids)
            keep = self.schedule.kept(recorded.record, left_out, pairs[0])
            self._count(cost, count)
            vectors, reads = step.pull_corrected(vectors, pairs, keep)
            total += reads
            self._check(recorded, step)
            growth.note(recorded, vectors)
        growth.warn()
        return total

    def _step(
        self, recorded: RecordedStep, chunk: int | None, examples: int | None = None, threads: int | None = None
    ) -> LinearStep:
        curvature = self.kind(recorded.task, recorded.params, recorded.batch, chunk, examples, threads)
        return LinearStep(self.trajectory.rule, recorded, curvature, self.path)

    def _check(self, recorded: RecordedStep, step: LinearStep) -> None:
        """Recompute every step whose gradient is known; of the others, some, including the first and the last."""
        index = recorded.record.index
        cast = self.trajectory.trained.autocast is not None
        if (step.has_gradient and not cast) or index % CHECK_EVERY == 0 or index == len(self.trajectory) - 1:
            check = self.trajectory.check
            check.step(recorded, check.recomputed(recorded, recorded.params) if cast else step.after)

    def _count(self, cost: Cost, vectors: int) -> None:
        cost.gradients += 1
        if self.curved:
            cost.hvps += vectors
