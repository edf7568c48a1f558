"""ACC at the price of SGD-IE: the shared backward sweep, and each row's correction by a cheap transport.

With u the shared vector of SGD-IE and ``a_i = (∂O/∂g)ᵀ u_{i+1}`` its part for the batch gradient, ACC's score is

    score_r = −Σ_i (1/|Z_i|) Σ_{z ∈ r∩Z_i} ⟨a_i, g(z) + H(z)·δ_r⟩

so that all there is to do for a row is to carry its δ_r from one occurrence to the next. Two orders of the same sum:

*remainder*, backward, for one query: a remainder e_r travels instead of δ_r, ``e_r ← Cᵀ e_r − (1/|Z|) H(z)·a``, and
``⟨bᵀ e_r, g(z)⟩`` is read; the products H(z)·a also average to H(Z)·a, which u needs anyway.
*corrected gradient*, for many queries: a backward sweep keeps every a_i; then δ_r travels forward and is read with
all of them. The products H(z)·δ_r do not depend on the query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leaveout._util.allocator import returned
from leaveout._util.trees import PARAM, Params, each, embed, expand, height, split
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import UnsupportedError
from leaveout.sweep import budget
from leaveout.sweep.checkpoint import SweepCheckpoint
from leaveout.sweep.curvature import Curvature, Hessian, check_symmetric
from leaveout.sweep.free_transport import Layout, RowFile, drift, sketch
from leaveout.sweep.schedule import Schedule
from leaveout.sweep.stability import Growth
from leaveout.sweep.subspace import top_directions
from leaveout.sweep.sweep import ALWAYS, Sweep
from leaveout.sweep.transports import Free, Subspace, SubspaceTransport, Transport, place, turns
from leaveout.task.batches import leaves, map_leaves
from leaveout.trajectory.left_out import LeftOut
from leaveout.trajectory.recorded_step import RecordedStep
from leaveout.trajectory.trajectory import Trajectory

MOST_PAIRS = 2**40
FILE_BYTES = 4_000_000_000
"""How large a file for what reaches the steps may be, beyond one vector per step."""


@dataclass(frozen=True)
class Products:
    """What one sweep gives for every row and query vector: SGD-IE's inner products, and ACC's."""

    plain: Float[Tensor, "rows queries"]
    corrected: Float[Tensor, "rows queries"]


@dataclass(frozen=True)
class Correction:
    """A run, who is left out of it, and what may be used."""

    trajectory: Trajectory
    left_out: LeftOut
    resources: Resources
    cost: Cost
    kind: type[Curvature] = Hessian
    schedule: Schedule = ALWAYS

    def __post_init__(self) -> None:
        if not self.trajectory.rule.linear:
            raise UnsupportedError(
                f"Cheap transports need a step that is linear in the gradient, which {self.trajectory.rule.kind}'s is "
                "not: use ACC(transport='exact') or Replay() for few examples, SGDIE() for many.",
                code="step-not-linear",
            )
        check_symmetric(self.trajectory.task, self.kind)

    def remainders(self, queries: Params, width: int | None = None) -> Products:
        """Compute both scores for every query vector, a sweep each."""
        return _side_by_side([self.remainder(query, width) for query in split(queries, 1)])

    def remainder(self, query: Params, width: int | None = None) -> Products:
        """Compute both scores for one query vector in one backward sweep; ``width`` keeps remainders in a sketch."""
        task, rule, final = self.trajectory.task, self.trajectory.rule, self.trajectory.final()
        sweep = Sweep(self.trajectory, self.resources, self.cost, self.kind)
        layout = Layout(rule, final[PARAM])
        like = next(iter(final[PARAM].values()))
        project = sketch(layout, width, like) if width else None
        lazy = place(len(self.left_out), rule, layout.group if project is None else project.group, like, self.resources)
        # What is in a file already is not copied to another: such a sweep begins anew.
        checkpoint = SweepCheckpoint(None if lazy.disk else self.resources.checkpoint, self.cost, like.device)
        saved = checkpoint.saved()
        vectors = saved.vectors if saved else embed(query, final)
        plain = saved.gathered["plain"] if saved else like.new_zeros(len(self.left_out))
        extra = saved.gathered["extra"] if saved else torch.zeros_like(plain)
        waiting = saved is not None  # nothing is noted before the first correction
        if saved:
            lazy.unpack(saved.gathered)
        growth = Growth(task)
        recorded_steps = self.trajectory.backward(saved.step if saved else None)
        for recorded in self.resources.track(recorded_steps, len(self.trajectory), "backward"):
            size = len(recorded.record.ids)
            row, position = self.left_out.pairs(recorded.record.ids)
            step = drift(rule, recorded.record.hypers, task.l2, like)
            keep = self.schedule.kept(recorded.record, self.left_out, row)
            waiting |= keep is None or bool(keep.any())
            if not waiting:  # nothing has been corrected yet, nor is it here: SGD-IE's own step
                pulled = sweep.pull(recorded, vectors)
                vectors = pulled.state
                plain.index_add_(0, row, pulled.weights[0, position], alpha=-1)
                lazy.advance(step.carry.mT)
                continue
            at = expand(recorded.before, 1)
            state, along = rule.cotangent((at, at[PARAM]), vectors, recorded.record.hypers)
            self.cost.gradients += 1
            self.cost.hvps += 1
            own = _Own(self.kind(task, recorded.params, recorded.batch), layout, each(lambda t: t[0], along))
            gradient, mean = like.new_zeros((1, layout.width)), like.new_zeros((1, layout.width))
            reads = like.new_zeros(size)
            examples = turns(size, self._pairs)
            for part in examples:
                flat, bent = own(part)
                gradient += flat.mean(0, keepdim=True) * (len(flat) / size)
                mean += bent.mean(0, keepdim=True) * (len(flat) / size)
                reads[part] = flat @ layout.flatten(along)[0]
                flat = flat if project is None else project(flat)
                for pairs in _pairs(position, part, size, self._pairs):
                    chosen = _chosen(flat, position[pairs] - part.start)
                    extra.index_add_(0, row[pairs], lazy.read(row[pairs], step.enter, chosen), alpha=-1 / size)
            self._check(recorded, layout.unflatten(gradient))
            vectors = {**state, PARAM: each(torch.add, state[PARAM], layout.unflatten(mean))}
            growth.note(recorded, vectors)
            plain.index_add_(0, row, reads[position], alpha=-1 / size)
            lazy.advance(step.carry.mT)
            for part in examples:
                bent = bent if len(examples) == 1 else own(part)[1]
                bent = bent if project is None else project(bent)
                for pairs in _pairs(position, part, size, self._pairs):
                    chosen = _chosen(bent, position[pairs] - part.start)
                    terms = chosen if keep is None else chosen * keep[pairs][:, None].to(chosen)
                    lazy.add(row[pairs], terms[:, None], alpha=-1 / size)
            checkpoint.note(recorded.record.index, vectors, lambda: {"plain": plain, "extra": extra, **lazy.packed()})
        growth.tell()
        return Products(plain[:, None], (plain + extra)[:, None])

    def corrected_gradient(self, queries: Params, subspace: Subspace | None = None) -> Products:
        """Compute both scores for every query vector: as many at a time as the budget holds.

        A vector per step is kept for each: in memory, or in a temporary file where that saves sweeps.
        """
        basis = None if subspace is None else self._basis(queries, subspace)
        if basis is not None:  # the rest of the budget is for all else
            rest = self.resources.without(basis.numel() * basis.element_size())
            budget.check(rest, self.trajectory, budget.backward_bytes(self.trajectory), "one query vector and a basis")
            return replace(self, resources=rest)._by_chunks(queries, basis)
        return self._by_chunks(queries, None)

    def _basis(self, queries: Params, subspace: Subspace) -> Float[Tensor, "rank width"]:
        layout = Layout(self.trajectory.rule, each(lambda t: t[0], queries))
        rank = min(subspace.rank, layout.width)
        basis = top_directions(self.trajectory, layout, self.kind, rank, self.resources, self.cost)
        if self.resources.memory != "auto":  # the search needs more than what comes after it
            returned()
        return basis

    def _by_chunks(self, queries: Params, basis: Float[Tensor, "rank width"] | None) -> Products:
        count, width = height(queries), budget.param_bytes(self.trajectory) * len(self.trajectory)
        carried = self.resources.divided(2).chunk(2 * budget.backward_bytes(self.trajectory), count)
        kept = self.resources.divided(2).chunk(2 * width, count)
        disk = kept * 4 < carried or self.resources.divided(2).bytes < 2 * width
        chunk = min(carried, max(1, FILE_BYTES // width) if disk else kept)
        return _side_by_side([self._corrected_gradient(part, basis, disk) for part in split(queries, chunk)])

    def _corrected_gradient(self, queries: Params, basis: Float[Tensor, "rank width"] | None, disk: bool) -> Products:
        sweep = Sweep(self.trajectory, self.resources.divided(2), self.cost, self.kind)
        layout = Layout(self.trajectory.rule, each(lambda t: t[0], queries))
        like = next(iter(queries.values()))
        plain = like.new_zeros((len(self.left_out), height(queries)))
        shape = (len(self.trajectory), height(queries), layout.width)
        reached: Tensor | RowFile = RowFile(shape, like) if disk else like.new_empty(shape)
        for recorded, pulled in sweep.pulled(queries):
            row, position = self.left_out.pairs(recorded.record.ids)
            plain.index_add_(0, row, pulled.weights[:, position].T, alpha=-1)
            reached[torch.tensor([recorded.record.index])] = layout.flatten(pulled.gradient)[None]
            del pulled
        extra = torch.zeros_like(plain)
        transport, stop = self._transport(layout, basis, like), self._stop()
        for recorded in self.resources.track(self.trajectory.forward(), len(self.trajectory), "forward"):
            if recorded.record.index >= stop:
                break
            row, position = self.left_out.pairs(recorded.record.ids)
            if not len(row):
                transport.advance(recorded)
                continue
            keep = self.schedule.kept(recorded.record, self.left_out, row)
            self.cost.gradients += 1
            self.cost.hvps += transport.products(keep)
            along = reached[torch.tensor([recorded.record.index])][0].T
            size = self._pairs if basis is None else max(1, self._pairs // 3)
            for part, curved in transport.step(recorded, row, position, size, keep):
                extra.index_add_(0, part, curved @ along, alpha=-1 / len(recorded.record.ids))
        return Products(plain, plain + extra)

    def _transport(self, layout: Layout, basis: Float[Tensor, "rank width"] | None, like: Tensor) -> Transport:
        free = Free(self.trajectory, layout, self.kind, len(self.left_out), self.resources, like)
        return free if basis is None else SubspaceTransport(self.trajectory, layout, free, basis)

    def _stop(self) -> int:
        """Return the step after the last one that is corrected."""
        stop = 0 if self.schedule.probability == 0 else len(self.trajectory)
        while stop and not self.schedule.within(self.trajectory.run.record(stop - 1).epoch):
            stop -= 1
        return stop

    @cached_property
    def _pairs(self) -> int:
        """Pairs of rows and examples that are looked at together."""
        return self.resources.divided(4).chunk(budget.pair_bytes(self.trajectory), MOST_PAIRS)

    def _check(self, recorded: RecordedStep, gradient: Params) -> None:
        after = self.trajectory.rule.step(recorded.before, each(lambda t: t[0], gradient), recorded.record.hypers)
        self.trajectory.check.step(recorded, after)


@dataclass(frozen=True)
class _Own:
    """g(z) and C(z)·a of a batch's examples, a row each."""

    curvature: Curvature
    layout: Layout
    vector: Params

    def __call__(self, part: slice) -> tuple[Float[Tensor, "some width"], Float[Tensor, "some width"]]:
        batch = self.curvature.batch
        examples = (
            batch if part.start == 0 and part.stop >= len(leaves(batch)[0]) else map_leaves(lambda t: t[part], batch)
        )
        gradients, curved = self.curvature.own(examples, self.vector)
        return self.layout.flatten(gradients), self.layout.flatten(curved)


def _pairs(position: Int[Tensor, " pairs"], part: slice, size: int, most: int) -> list[Int[Tensor, " some"]]:
    """Return which pairs are of a part of the batch, at most so many at a time."""
    if part.start == 0 and part.stop >= size:
        return list(torch.arange(len(position)).split(most)) if len(position) else []
    within = ((position >= part.start) & (position < part.stop)).nonzero()[:, 0]
    return list(within.split(most)) if len(within) else []


def _side_by_side(parts: list[Products]) -> Products:
    plain = torch.cat([part.plain for part in parts], dim=1)
    return Products(plain, torch.cat([part.corrected for part in parts], dim=1))


def _chosen(matrix: Float[Tensor, "batch width"], position: Int[Tensor, " pairs"]) -> Float[Tensor, "pairs width"]:
    """Return its rows at these positions, without a copy where they are all of them in their order."""
    whole = len(position) == len(matrix) and torch.equal(position, torch.arange(len(matrix)))
    return matrix if whole else matrix[position]
