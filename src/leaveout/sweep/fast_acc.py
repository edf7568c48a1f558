"""ACC at the price of SGD-IE: the shared backward sweep, and each row's correction through a cheap transport.

With u the shared vector of SGD-IE and ``a_i = (∂O/∂g)ᵀ u_{i+1}`` its part for the batch gradient, ACC's score is

    score_r = −Σ_i (1/|Z_i|) Σ_{z ∈ r∩Z_i} ⟨a_i, g(z) + H(z)·δ_r⟩

so all that remains for a row is to carry its δ_r from one occurrence to the next. There are two orders of this sum:

*remainder*, backward, for one query: a remainder e_r is carried instead of δ_r, ``e_r ← Cᵀ e_r − (1/|Z|) H(z)·a``,
and ``⟨bᵀ e_r, g(z)⟩`` is read; the products H(z)·a also average to H(Z)·a, which u needs anyway.
*corrected gradient*, for many queries: a backward sweep keeps every a_i; then δ_r is carried forward and read with all
of them. The products H(z)·δ_r do not depend on the query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout._util.trees import Params, add_rows, each, height, split
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources, return_memory
from leaveout.diff.hessian import check_symmetric
from leaveout.errors import UnsupportedError
from leaveout.sweep import budget
from leaveout.sweep.checkpoint import SweepCheckpoint
from leaveout.sweep.free_transport import Layout, RowFile
from leaveout.sweep.remainder import Remainders, pair_count
from leaveout.sweep.sweep import Sweep
from leaveout.sweep.transports import Free, Subspace, SubspaceTransport, Transport, top_directions
from leaveout.trajectory.left_out import LeftOut
from leaveout.trajectory.trajectory import Trajectory

FILE_BYTES = 4_000_000_000
"""How large a file for the vectors that reach the steps may be, beyond one vector per step."""


class Products(NamedTuple):
    """What one sweep gives for every row and query vector: SGD-IE's inner products, and ACC's."""

    plain: Float[Tensor, "rows queries"]
    corrected: Float[Tensor, "rows queries"]


@dataclass(frozen=True)
class Correction:
    """A sweep, what is left out of its run, the resources it may use, and where products are counted."""

    sweep: Sweep
    left_out: LeftOut
    resources: Resources
    cost: Cost

    def __post_init__(self) -> None:
        if not self.trajectory.rule.additive:
            raise UnsupportedError(
                "Free and subspace transport need a step that is linear in the gradient, which "
                f"{self.trajectory.rule.kind}'s is not: use ACC(), which reads the finite change of such a step (the "
                "jump), or, for few examples, ACC(transport='exact') or Replay().",
                code="step-not-linear",
            )
        check_symmetric(self.trajectory.objective, self.sweep.kind)

    @property
    def trajectory(self) -> Trajectory:
        """The run and its objective."""
        return self.sweep.trajectory

    def remainders(self, queries: Params, width: int | None = None) -> Products:
        """Compute both scores for every query vector, with one sweep each."""
        return _side_by_side([self.remainder(query, width) for query in split(queries, 1)])

    def remainder(self, query: Params, width: int | None = None) -> Products:
        """Compute both scores for one query vector in one backward sweep; ``width`` keeps remainders in a sketch."""
        rows = Remainders(self.sweep, self.left_out, self.resources, width)
        # What is already in a file is not copied to another: such a sweep starts over.
        place = None if rows.disk else self.resources.checkpoint
        checkpoint = SweepCheckpoint(place, self.cost, rows.plain.device)
        saved = checkpoint.saved()
        if saved:
            rows.unpack(saved.gathered)
        passage = self.sweep.passage(query, saved)
        for recorded in self.sweep.backward(self.resources, saved):
            step = self.sweep.step(recorded)
            carried, along = step.arrive(passage.vectors)
            product = rows.product(recorded, step.operator, along)
            passage.leave(recorded, step.pulled(passage.vectors, carried, along, product), self.cost)
            if rows.begun:
                checkpoint.note(recorded.record.index, passage.vectors, rows.packed)
        passage.growth.warn()
        return Products(rows.plain[:, None], (rows.plain + rows.extra)[:, None])

    def corrected_gradient(self, queries: Params, subspace: Subspace | None = None) -> Products:
        """Compute both scores for every query vector, as many at a time as the budget holds.

        One vector per step is kept for each: in memory, or in a temporary file if that saves sweeps.
        """
        basis = None if subspace is None else self._basis(queries, subspace)
        if basis is not None:  # the rest of the budget is for everything else
            rest = self.resources.without(basis.numel() * basis.element_size())
            budget.check(rest, self.trajectory, budget.backward_bytes(self.trajectory), "one query vector and a basis")
            return replace(self, resources=rest)._by_chunks(queries, basis)
        return self._by_chunks(queries, None)

    def _basis(self, queries: Params, subspace: Subspace) -> Float[Tensor, "rank width"]:
        layout = Layout(self.trajectory.rule, each(lambda t: t[0], queries))
        rank = min(subspace.rank, layout.width)
        basis = top_directions(self.trajectory, layout, self.sweep.kind, rank, self.resources, self.cost)
        if self.resources.memory != "auto":  # the search needs more memory than what comes after it
            return_memory()
        return basis

    def _by_chunks(self, queries: Params, basis: Float[Tensor, "rank width"] | None) -> Products:
        count, width = height(queries), budget.param_bytes(self.trajectory) * len(self.trajectory)
        carried = self.resources.divided(2).chunk(2 * budget.backward_bytes(self.trajectory), count)
        kept = self.resources.divided(2).chunk(2 * width, count)
        disk = kept * 4 < carried or self.resources.divided(2).bytes < 2 * width
        chunk = min(carried, max(1, FILE_BYTES // width) if disk else kept)
        return _side_by_side([self._corrected_gradient(part, basis, disk) for part in split(queries, chunk)])

    def _corrected_gradient(self, queries: Params, basis: Float[Tensor, "rank width"] | None, disk: bool) -> Products:
        layout = Layout(self.trajectory.rule, each(lambda t: t[0], queries))
        like = next(iter(queries.values()))
        plain = like.new_zeros((len(self.left_out), height(queries)))
        shape = (len(self.trajectory), height(queries), layout.width)
        reached: Tensor | RowFile = RowFile(shape, like) if disk else like.new_empty(shape)
        for recorded, pulled in self.sweep.pulled(queries, self.resources.divided(2), self.cost):
            pulled.add_to(plain, self.left_out.pairs(recorded.record.ids))
            reached[torch.tensor([recorded.record.index])] = layout.flatten(pulled.along)[None]
            del pulled
        extra = torch.zeros_like(plain)
        transport, stop = self._transport(layout, basis, like), self._stop()
        most = pair_count(self.sweep, self.resources)
        size = most if basis is None else max(1, most // 3)
        for recorded in self.resources.track(self.trajectory.forward(), len(self.trajectory), "forward"):
            if recorded.record.index >= stop:
                break
            row, position = self.left_out.pairs(recorded.record.ids)
            if not len(row):
                transport.advance(recorded)
                continue
            keep = self.sweep.schedule.kept(recorded.record, self.left_out, row)
            self.cost.gradients += 1
            self.cost.hvps += transport.products(keep)
            along = reached[torch.tensor([recorded.record.index])][0].T
            for part, curved in transport.step(recorded, row, position, size, keep):
                add_rows(extra, part, curved @ along, alpha=-1 / len(recorded.record.ids))
        return Products(plain, plain + extra)

    def _transport(self, layout: Layout, basis: Float[Tensor, "rank width"] | None, like: Tensor) -> Transport:
        free = Free(self.trajectory, layout, self.sweep.kind, len(self.left_out), self.resources, like)
        return free if basis is None else SubspaceTransport(self.trajectory, layout, free, basis)

    def _stop(self) -> int:
        """Return the step after the last one that is corrected."""
        stop = 0 if self.sweep.schedule.probability == 0 else len(self.trajectory)
        while stop and not self.sweep.schedule.within(self.trajectory.run.record(stop - 1).epoch):
            stop -= 1
        return stop


def remainders(
    sweep: Sweep, left_out: LeftOut, queries: Params, resources: Resources, cost: Cost, *, width: int | None = None
) -> Products:
    """Compute SGD-IE's and ACC's products for every query vector, with one sweep each."""
    return Correction(sweep, left_out, resources, cost).remainders(queries, width)


def corrected_gradient(
    sweep: Sweep,
    left_out: LeftOut,
    queries: Params,
    resources: Resources,
    cost: Cost,
    *,
    subspace: Subspace | None = None,
) -> Products:
    """Compute SGD-IE's and ACC's products for all query vectors, in the order of the corrected gradient."""
    return Correction(sweep, left_out, resources, cost).corrected_gradient(queries, subspace)


def _side_by_side(parts: list[Products]) -> Products:
    plain = torch.cat([part.plain for part in parts], dim=1)
    return Products(plain, torch.cat([part.corrected for part in parts], dim=1))
