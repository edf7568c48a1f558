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

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leaveout._util.trees import PARAM, Params, each, embed, expand, height, nbytes, split
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import UnsupportedError
from leaveout.sweep.checkpoint import Mark
from leaveout.sweep.curvature import Curvature, Hessian
from leaveout.sweep.free_transport import Layout, drift, sketch
from leaveout.sweep.schedule import Occasions
from leaveout.sweep.stability import Growth
from leaveout.sweep.subspace import top_directions
from leaveout.sweep.sweep import ALWAYS, Sweep, vector_bytes
from leaveout.sweep.transports import Carrier, Free, Subspace, SubspaceCarrier, place
from leaveout.trajectory.left_out import Members
from leaveout.trajectory.recorded_step import Moment
from leaveout.trajectory.trajectory import Trajectory


@dataclass(frozen=True)
class Products:
    """What one sweep gives for every row and query vector: SGD-IE's inner products, and ACC's."""

    plain: Float[Tensor, "rows queries"]
    corrected: Float[Tensor, "rows queries"]


@dataclass(frozen=True)
class Correction:
    """A run, who is left out of it, and what may be used."""

    trajectory: Trajectory
    members: Members
    resources: Resources
    cost: Cost
    kind: type[Curvature] = Hessian
    occasions: Occasions = ALWAYS

    def __post_init__(self) -> None:
        if not self.trajectory.rule.linear:
            raise UnsupportedError(
                f"Cheap transports need a step that is linear in the gradient, which {self.trajectory.rule.kind}'s is "
                "not: use ACC(transport='exact') or Replay() for few examples, SGDIE() for many."
            )

    def remainders(self, queries: Params, width: int | None = None) -> Products:
        """Both scores for every query vector, a sweep each."""
        return _side_by_side([self.remainder(query, width) for query in split(queries, 1)])

    def remainder(self, query: Params, width: int | None = None) -> Products:
        """Both scores for one query vector, in one backward sweep; ``width`` keeps the remainders in a sketch."""
        task, rule, final = self.trajectory.task, self.trajectory.rule, self.trajectory.final()
        sweep = Sweep(self.trajectory, self.resources, self.cost, self.kind)
        layout = Layout(rule, final[PARAM])
        like = next(iter(final[PARAM].values()))
        project = sketch(layout, width, like) if width else None
        held = place(len(self.members), rule, layout.group if project is None else project.group, like, self.resources)
        # What is in a file already is not copied to another: such a sweep begins anew.
        mark = Mark(None if held.disk else self.resources.mark, self.cost, like.device)
        noted = mark.noted()
        vectors = noted.vectors if noted else embed(query, final)
        plain = noted.gathered["plain"] if noted else like.new_zeros(len(self.members))
        extra = noted.gathered["extra"] if noted else torch.zeros_like(plain)
        waiting = noted is not None  # nothing is noted before the first correction
        if noted:
            held.unpack(noted.gathered)
        growth = Growth(task)
        moments = self.trajectory.backward(noted.step if noted else None)
        for moment in self.resources.track(moments, len(self.trajectory), "backward"):
            size = len(moment.record.ids)
            row, position = self.members.pairs(moment.record.ids)
            step = drift(rule, moment.record.hypers, task.l2, like)
            keep = self.occasions.kept(moment.record, self.members, row)
            waiting |= keep is None or bool(keep.any())
            if not waiting:  # nothing has been corrected yet, nor is it here: SGD-IE's own step
                pulled = sweep.pull(moment, vectors)
                vectors = pulled.state
                plain.index_add_(0, row, pulled.weights[0, position], alpha=-1)
                held.advance(step.carry.mT)
                continue
            at = expand(moment.before, 1)
            state, along = rule.cotangent((at, at[PARAM]), vectors, moment.record.hypers)
            self.cost.gradients += 1
            self.cost.hvps += 1
            curvature = self.kind(task, moment.params, moment.batch, self._chunk(moment))
            gradients, curved = curvature.own(moment.batch, each(lambda t: t[0], along))
            flat, bent = layout.flatten(gradients), layout.flatten(curved)
            self._check(moment, layout.unflatten(flat.mean(0, keepdim=True)))
            mean = layout.unflatten(bent.mean(0, keepdim=True))
            vectors = {**state, PARAM: each(torch.add, state[PARAM], mean)}
            growth.note(moment, vectors)
            plain.index_add_(0, row, (flat @ layout.flatten(along)[0])[position], alpha=-1 / size)
            if project is not None:
                flat, bent = project(flat), project(bent)
            flat, bent = _chosen(flat, position), _chosen(bent, position)
            extra.index_add_(0, row, held.read(row, step.enter, flat), alpha=-1 / size)
            held.advance(step.carry.mT)
            taken = bent if keep is None else bent * keep[:, None].to(bent)
            held.add(row, taken[:, None], alpha=-1 / size)
            mark.note(moment.record.index, vectors, lambda: {"plain": plain, "extra": extra, **held.packed()})
        growth.tell()
        return Products(plain[:, None], (plain + extra)[:, None])

    def corrected_gradient(self, queries: Params, transport: Subspace | None = None) -> Products:
        """Both scores for every query vector: as many at a time as the budget holds a vector a step for."""
        width = sum(tensor[0].numel() * tensor.element_size() for tensor in queries.values())
        chunk = self.resources.chunk(2 * width * len(self.trajectory), height(queries))
        return _side_by_side([self._corrected_gradient(part, transport) for part in split(queries, chunk)])

    def _corrected_gradient(self, queries: Params, transport: Subspace | None) -> Products:
        sweep = Sweep(self.trajectory, self.resources, self.cost, self.kind)
        layout = Layout(self.trajectory.rule, each(lambda t: t[0], queries))
        like = next(iter(queries.values()))
        plain = like.new_zeros((len(self.members), height(queries)))
        reached = like.new_empty((len(self.trajectory), height(queries), layout.width))
        for moment, pulled in sweep.pulled(queries):
            row, position = self.members.pairs(moment.record.ids)
            plain.index_add_(0, row, pulled.weights[:, position].T, alpha=-1)
            reached[moment.record.index] = layout.flatten(pulled.gradient)
        extra = torch.zeros_like(plain)
        carrier, stop = self._carrier(layout, transport, like), self._stop()
        for moment in self.resources.track(self.trajectory.forward(), len(self.trajectory), "forward"):
            if moment.record.index >= stop:
                break
            row, position = self.members.pairs(moment.record.ids)
            if not len(row):
                carrier.advance(moment)
                continue
            keep = self.occasions.kept(moment.record, self.members, row)
            curved = carrier.step(moment, row, position, self._chunk(moment), keep)
            self.cost.gradients += 1
            self.cost.hvps += carrier.products(keep)
            extra.index_add_(0, row, curved @ reached[moment.record.index].T, alpha=-1 / len(moment.record.ids))
        return Products(plain, plain + extra)

    def _carrier(self, layout: Layout, transport: Subspace | None, like: Tensor) -> Carrier:
        free = Free(self.trajectory, layout, self.kind, len(self.members), self.resources, like)
        if transport is None:
            return free
        rank = min(transport.rank, layout.width)
        basis = top_directions(self.trajectory, layout, self.kind, rank, self.resources, self.cost)
        return SubspaceCarrier(self.trajectory, layout, free, basis)

    def _stop(self) -> int:
        """The step after the last one that is corrected."""
        stop = 0 if self.occasions.probability == 0 else len(self.trajectory)
        while stop and not self.occasions.within(self.trajectory.run.record(stop - 1).epoch):
            stop -= 1
        return stop

    def _chunk(self, moment: Moment) -> int:
        """Examples of a batch that go through a product at a time."""
        return self.resources.chunk(self._example_bytes, len(moment.record.ids))

    @cached_property
    def _example_bytes(self) -> int:
        return vector_bytes(self.trajectory) // len(self.trajectory.run.record(0).ids) + 8 * nbytes(
            {PARAM: self.trajectory.initial()[PARAM]}
        )

    def _check(self, moment: Moment, gradient: Params) -> None:
        after = self.trajectory.rule.step(moment.before, each(lambda t: t[0], gradient), moment.record.hypers)
        self.trajectory.check.step(moment, after)


def _side_by_side(parts: list[Products]) -> Products:
    plain = torch.cat([part.plain for part in parts], dim=1)
    return Products(plain, torch.cat([part.corrected for part in parts], dim=1))


def _chosen(matrix: Float[Tensor, "batch width"], position: Int[Tensor, " pairs"]) -> Float[Tensor, "pairs width"]:
    """Its rows at these positions, without a copy where they are all of them in their order."""
    whole = len(position) == len(matrix) and torch.equal(position, torch.arange(len(matrix)))
    return matrix if whole else matrix[position]
