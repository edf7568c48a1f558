"""Carries vectors through the steps of a run, forward and backward: the only such loops.

Forward, a displacement a row, δ ← ∂F·δ + (what the row's examples did). Backward, a vector a query, u ← ∂Fᵀ·u,
read off at every occurrence of every example; both give the same inner products ⟨u_N, δ_N⟩.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout.members import Members
from leaveout.resources import Cost, Resources
from leaveout.step import Flat, Hessian, LinearStep, Pulled
from leaveout.trajectory import Moment, Trajectory, check_projection, check_step
from leaveout.vectors import PARAM, Params, State, each, embed, height, nbytes, zeros

CHECK_EVERY = 16


@dataclass(frozen=True)
class Sweep:
    """One way through a run: what carries the vectors, and which gradient is read.

    Args:
        trajectory: the run and its task.
        resources: memory budget and progress.
        cost: where the products are counted.
        curved: transport by the linearised step with the true Hessian; otherwise vectors stay where they are.
        corrected: linearise each row's counterfactual step instead of the recorded one.
    """

    trajectory: Trajectory
    resources: Resources
    cost: Cost
    curved: bool = True
    corrected: bool = False

    def displacements(self, members: Members) -> State:
        """δ_N for every row: forward, one vector a row."""
        moved = zeros(self.trajectory.initial(), len(members))
        for _, moved in self.course(members):  # noqa: B007 - the last one counts
            pass
        return moved

    def course(self, members: Members) -> Iterator[tuple[Moment, State]]:
        """δ of every row on its way: each step, from the first, with the displacements after it."""
        moved = zeros(self.trajectory.initial(), len(members))
        chunk = self.chunk(len(members))
        for moment in self._track(self.trajectory.forward(), "forward"):
            step = self._step(moment, chunk)
            pairs = members.pairs(moment.record.ids)
            self._count(moment, len(members), len(pairs[0]))
            if not self.curved:
                jump = step.inject(pairs, len(members))
                moved = {slot: each(torch.add, moved[slot], jump[slot]) for slot in moved}
            elif self.corrected:
                moved = step.push_corrected(moved, pairs)
            else:
                moved = step.push(moved, pairs)
            self._check(moment, step)
            yield moment, moved

    def inner_products(self, members: Members, queries: Params) -> Float[Tensor, "rows queries"]:
        """⟨u_q, δ_r⟩ for every row and query vector, backward."""
        if self.corrected:
            columns = [self._private(members, {n: t[i] for n, t in queries.items()}) for i in range(height(queries))]
            return torch.stack(columns, dim=1)
        return self._shared(members, queries)

    def chunk(self, count: int) -> int:
        """How many vectors go through a product at a time."""
        return self.resources.chunk(vector_bytes(self.trajectory), count)

    def pulled(self, queries: Params) -> Iterator[tuple[Moment, Pulled]]:
        """The query vectors on their way back: each step, from the last, with what reaches it."""
        vectors = embed(queries, self.trajectory.final())
        count = height(queries)
        chunk = self.chunk(count)
        for moment in self._track(self.trajectory.backward(), "backward"):
            self._count(moment, count, 0)
            step = self._step(moment, chunk)
            pulled = step.pull(vectors)
            self._check(moment, step)
            if count == 1 and self.trajectory.rule.linear:
                check_projection(moment, vectors, pulled.carried, float(pulled.weights.sum()))
            if self.curved:
                vectors = pulled.state
            yield moment, pulled

    def _shared(self, members: Members, queries: Params) -> Float[Tensor, "rows queries"]:
        """One vector a query serves all rows: −(∂F/∂w_k)ᵀu is added to k's row at each of its occurrences."""
        totals = next(iter(queries.values())).new_zeros((len(members), height(queries)))
        for moment, pulled in self.pulled(queries):
            row, position = members.pairs(moment.record.ids)
            totals.index_add_(0, row, pulled.weights[:, position].T, alpha=-1)
        return totals

    def _private(self, members: Members, query: Params) -> Float[Tensor, " rows"]:
        """A vector a row, u + e_k: the shared vector with the row's own remainder."""
        count = len(members)
        stacked = {name: tensor.expand(count, *tensor.shape) for name, tensor in query.items()}
        vectors = embed(stacked, self.trajectory.final())
        total = next(iter(query.values())).new_zeros(count)
        chunk = self.chunk(count)
        for moment in self._track(self.trajectory.backward(), "backward"):
            step = self._step(moment, chunk)
            pairs = members.pairs(moment.record.ids)
            self._count(moment, count, len(pairs[0]))
            vectors, read = step.pull_corrected(vectors, pairs)
            total += read
            self._check(moment, step)
        return total

    def _step(self, moment: Moment, chunk: int) -> LinearStep:
        kind = Hessian if self.curved else Flat
        curvature = kind(self.trajectory.task, moment.before[PARAM], moment.batch, chunk)
        return LinearStep(self.trajectory.rule, moment, curvature)

    def _check(self, moment: Moment, step: LinearStep) -> None:
        """Every step whose gradient is at hand is computed again; a single vector goes without, but not always."""
        if step.has_gradient or moment.record.index % CHECK_EVERY == 0:
            check_step(moment, step.after)

    def _count(self, moment: Moment, vectors: int, pairs: int) -> None:
        self.cost.gradients += 1
        if self.curved:
            self.cost.hvps += vectors + (-(-pairs // len(moment.record.ids)) if self.corrected else 0)

    def _track(self, moments: Iterable[Moment], what: str) -> Iterator[Moment]:
        return self.resources.track(moments, len(self.trajectory), what)


def vector_bytes(trajectory: Trajectory) -> int:
    """About what one vector needs on its way through a product: the batch's activations a few times, and itself."""
    task = trajectory.task
    params = trajectory.initial()[PARAM]
    held = task.footprint(params, trajectory.batch(0))
    return 4 * held + 4 * nbytes({PARAM: params})
