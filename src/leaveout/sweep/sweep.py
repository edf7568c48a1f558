"""Carries vectors through the steps of a run, forward and backward: the only such loops.

Forward, a displacement a row, δ ← ∂F·δ + (what the row's examples did). Backward, a vector a query, u ← ∂Fᵀ·u,
read off at every occurrence of every example; both give the same inner products ⟨u_N, δ_N⟩.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout._util.trees import PARAM, Params, State, each, embed, height, zeros
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.sweep import budget
from leaveout.sweep.checkpoint import Mark, Noted
from leaveout.sweep.curvature import Curvature, Flat, Hessian, check_symmetric
from leaveout.sweep.linear_step import LinearStep, Pulled
from leaveout.sweep.schedule import Occasions
from leaveout.sweep.stability import Growth
from leaveout.trajectory.left_out import Members
from leaveout.trajectory.recorded_step import Moment
from leaveout.trajectory.trajectory import Trajectory

CHECK_EVERY = 16
ALWAYS = Occasions()


@dataclass(frozen=True)
class Sweep:
    """One way through a run: what carries the vectors, and which gradient is read.

    Args:
        trajectory: the run and its task.
        resources: memory budget and progress.
        cost: where the products are counted.
        kind: the curvature that carries vectors through the linearised step; with ``Flat`` they stay where they are.
        corrected: linearise each row's counterfactual step instead of the recorded one.
        occasions: where, if not everywhere.
        path: a symmetric linear map that every change of a batch gradient goes through.
    """

    trajectory: Trajectory
    resources: Resources
    cost: Cost
    kind: type[Curvature] = Hessian
    corrected: bool = False
    occasions: Occasions = ALWAYS
    path: Callable[[Params], Params] | None = None

    @property
    def curved(self) -> bool:
        """Whether vectors move with the steps."""
        return self.kind is not Flat

    def displacements(self, members: Members) -> State:
        """δ_N for every row: forward, one vector a row."""
        moved = zeros(self.trajectory.initial(), len(members))
        for _, moved in self.course(members):  # noqa: B007 - the last one counts
            pass
        return moved

    def course(self, members: Members) -> Iterator[tuple[Moment, State]]:
        """δ of every row on its way: each step, from the first, with the displacements after it."""
        moved = zeros(self.trajectory.initial(), len(members))
        growth = Growth(self.trajectory.task, steady=True)
        chunk = self.chunk(len(members))
        for moment in self._track(self.trajectory.forward(), "forward"):
            step = self._step(moment, chunk)
            pairs = members.pairs(moment.record.ids)
            keep = self.occasions.kept(moment.record, members, pairs[0])
            self._count(len(members))
            if not self.curved:
                jump = step.inject(pairs, len(members))
                moved = {slot: each(torch.add, moved[slot], jump[slot]) for slot in moved}
            elif self.corrected:
                moved = step.push_corrected(moved, pairs, keep)
            else:
                moved = step.push(moved, pairs)
            self._check(moment, step)
            growth.note(moment, moved)
            yield moment, moved
        growth.tell()

    def inner_products(self, members: Members, queries: Params) -> Float[Tensor, "rows queries"]:
        """⟨u_q, δ_r⟩ for every row and query vector, backward."""
        if self.corrected:
            size = self.resources.chunk(2 * budget.forward_bytes(self.trajectory), len(members))
            parts = list(members.chunks(size))
            columns = [
                torch.cat([self._private(part, {n: t[i] for n, t in queries.items()}) for part in parts])
                for i in range(height(queries))
            ]
            return torch.stack(columns, dim=1)
        return self._shared(members, queries)

    def chunk(self, count: int) -> int:
        """How many vectors go through a product at a time."""
        return budget.chunk(self.resources, self.trajectory, count)

    def pulled(self, queries: Params, noted: Noted | None = None) -> Iterator[tuple[Moment, Pulled]]:
        """The query vectors on their way back: each step, from the last, with what reaches it."""
        vectors = noted.vectors if noted else embed(queries, self.trajectory.final())
        growth = Growth(self.trajectory.task)
        chunk = self.chunk(height(queries))
        for moment in self._track(self.trajectory.backward(noted.step if noted else None), "backward"):
            pulled = self.pull(moment, vectors, chunk)
            if self.curved:
                vectors = pulled.state
                growth.note(moment, vectors)
            yield moment, pulled
        growth.tell()

    def pull(self, moment: Moment, vectors: State, chunk: int = 1) -> Pulled:
        """One step back, counted and checked."""
        count = height(vectors[PARAM])
        self._count(count)
        step = self._step(moment, chunk)
        pulled = step.pull(vectors)
        self._check(moment, step)
        if count == 1 and self.trajectory.rule.linear and self.path is None:
            self.trajectory.check.along(moment, vectors, pulled.carried, float(pulled.weights.sum()))
        return pulled

    def _shared(self, members: Members, queries: Params) -> Float[Tensor, "rows queries"]:
        """One vector a query serves all rows: −(∂F/∂w_k)ᵀu is added to k's row at each of its occurrences."""
        mark = Mark(self.resources.mark, self.cost, self.trajectory.task.device)
        noted = mark.noted()
        fresh = next(iter(queries.values())).new_zeros((len(members), height(queries)))
        totals = noted.gathered["totals"] if noted else fresh
        still = embed(queries, self.trajectory.final())
        for moment, pulled in self.pulled(queries, noted):
            row, position = members.pairs(moment.record.ids)
            totals.index_add_(0, row, pulled.weights[:, position].T, alpha=-1)
            mark.note(moment.record.index, pulled.state if self.curved else still, lambda: {"totals": totals})
        return totals

    def _private(self, members: Members, query: Params) -> Float[Tensor, " rows"]:
        """A vector a row, u + e_k: the shared vector with the row's own remainder."""
        check_symmetric(self.trajectory.task, self.kind)
        count = len(members)
        stacked = {name: tensor.expand(count, *tensor.shape) for name, tensor in query.items()}
        vectors = embed(stacked, self.trajectory.final())
        total = next(iter(query.values())).new_zeros(count)
        growth = Growth(self.trajectory.task)
        chunk = self.chunk(count)
        for moment in self._track(self.trajectory.backward(), "backward"):
            step = self._step(moment, chunk)
            pairs = members.pairs(moment.record.ids)
            keep = self.occasions.kept(moment.record, members, pairs[0])
            self._count(count)
            vectors, read = step.pull_corrected(vectors, pairs, keep)
            total += read
            self._check(moment, step)
            growth.note(moment, vectors)
        growth.tell()
        return total

    def _step(self, moment: Moment, chunk: int) -> LinearStep:
        curvature = self.kind(self.trajectory.task, moment.params, moment.batch, chunk)
        return LinearStep(self.trajectory.rule, moment, curvature, self.path)

    def _check(self, moment: Moment, step: LinearStep) -> None:
        """Every step whose gradient is at hand is computed again; of the others some, the first and the last."""
        index = moment.record.index
        if step.has_gradient or index % CHECK_EVERY == 0 or index == len(self.trajectory) - 1:
            self.trajectory.check.step(moment, step.after)

    def _count(self, vectors: int) -> None:
        self.cost.gradients += 1
        if self.curved:
            self.cost.hvps += vectors

    def _track(self, moments: Iterable[Moment], what: str) -> Iterator[Moment]:
        return self.resources.track(moments, len(self.trajectory), what)
