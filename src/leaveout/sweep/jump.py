"""ACC for steps that are not linear in the gradient: read the step's finite change, not its derivative.

Removing an example from a batch is not a small change of the gradient, and Adam's step (or a clipped one) is not linear
in it. With u the backward vector of SGD-IE and O the optimizer's step,

    score_r = Σ_i ⟨u_{i+1}, O(s_i, ḡ_i − (1/|Z_i|) Σ_{z ∈ r∩Z_i} g(z)) − O(s_i, ḡ_i)⟩

It is the first term of exact ACC's correction. For SGD the step is linear and this is SGD-IE itself. The cost is that
of SGD-IE and of the batch's per-example gradients, whatever the number of examples: nothing is transported.

The step's change of the parameters is read directly with the inner product; its change of moments by whose root later
steps divide is read with saturation (``saturation.py``), since a derivative in them does not reach that far.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leaveout._util.blocks import Block, Coordinates, Joined, Touched
from leaveout._util.trees import PARAM, Params, State, add_rows, flat_rows, height, nbytes, sum_of
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources, shard_rows
from leaveout.compute.threads import spread
from leaveout.diff.hessian import Hessian, HessianByExample
from leaveout.sweep import budget
from leaveout.sweep.checkpoint import SweepCheckpoint
from leaveout.sweep.fast_acc import Products
from leaveout.sweep.leaving import Pairs
from leaveout.sweep.linear_step import Base, Jumps, Pulled
from leaveout.sweep.saturation import Saturation
from leaveout.sweep.sweep import Sweep
from leaveout.trajectory.left_out import LeftOut

ROW = 8
"""How many vectors of the state's size one left-out row needs while its jump is read."""

MANY = 8
"""Blocks from which on each thread takes its own."""


def jump_products(
    sweep: Sweep,
    left_out: LeftOut,
    queries: Params,
    resources: Resources,
    cost: Cost,
    *,
    together: bool = True,
    saturated: bool = True,
) -> Products:
    """Compute SGD-IE's inner products and those of the jumps, for every row and query vector, in one backward sweep.

    Args:
        sweep: the run, the curvature that carries the query vectors, and which occurrences are corrected.
        left_out: the rows, single examples or groups.
        queries: the query vectors at the end of the run.
        resources: memory budget and progress.
        cost: where the products are counted.
        together: a row's examples leave a batch in one jump; otherwise the jumps of its single examples are added.
        saturated: moments by whose root later steps divide are read with saturation; otherwise by their derivative.
    """
    sweep = _with_gradients(sweep, left_out, resources)
    checkpoint = SweepCheckpoint(resources.checkpoint, cost, sweep.trajectory.objective.device)
    saved = checkpoint.saved()
    like = next(iter(queries.values()))
    fresh = {name: like.new_zeros((len(left_out), height(queries))) for name in ("plain", "extra")}
    sums = {name: saved.gathered[name] for name in fresh} if saved else fresh
    chunk = resources.chunk(2 * ROW * nbytes(sweep.trajectory.initial()), max(1, len(left_out)))
    saturation = Saturation(sweep.trajectory.rule, sweep.trajectory.final()[PARAM]) if saturated else None
    reading = Reading(saturation, chunk, together)
    if saved and saturation:
        saturation.unpack(saved.gathered)
    for recorded, pulled in sweep.pulled(queries, resources, cost, saved):
        row, position = left_out.pairs(recorded.record.ids)
        plain = -pulled.reads[:, position].T
        add_rows(sums["plain"], row, plain)
        keep = sweep.schedule.kept(recorded.record, left_out, row)
        if keep is not None:
            row, position, plain = row[keep], position[keep], plain[keep]
        base = None
        if len(row):
            base = reading.add(sums["extra"], (row, position), recorded.record.ids, pulled)
            add_rows(sums["extra"], row, plain, alpha=-1)
        reading.count_step(pulled, base)
        checkpoint.note(recorded.record.index, sweep.onward(recorded, pulled), lambda: {**sums, **reading.packed()})
    return Products(sums["plain"], sums["plain"] + sums["extra"])


def _with_gradients(sweep: Sweep, left_out: LeftOut, resources: Resources) -> Sweep:
    """Return a sweep whose products come with per-example gradients, if most of these are needed and all fit."""
    trajectory = sweep.trajectory
    count, bytes_each = len(trajectory.run.record(0).ids), 2 * budget.param_bytes(trajectory)
    held = shard_rows(bytes_each, count) if resources.memory == "auto" else resources.chunk(bytes_each, count)
    most = 2 * len(left_out.examples) >= trajectory.task.size
    return replace(sweep, kind=HessianByExample) if sweep.kind is Hessian and most and held == count else sweep


@dataclass(frozen=True)
class Reading:
    """How jumps are read with the vectors that arrive at their step: with saturation, so many rows at a time.

    A row's examples leave the batch ``together``, or the jumps of its single examples are added.
    """

    saturation: Saturation | None
    chunk: int
    together: bool = True

    def add(
        self, total: Float[Tensor, "rows queries"], pairs: Pairs, ids: Int[Tensor, " batch"], pulled: Pulled
    ) -> Base:
        """Add every row's jump, read with the arriving vectors, to its row of the total; return the step it is from."""
        if self.together:
            return self._add_rows(total, pairs, pulled)
        return self._add_single(total, pairs, ids, pulled)

    def _add_rows(self, total: Float[Tensor, "rows queries"], pairs: Pairs, pulled: Pulled) -> Base:
        """Add the jump of each row without all of its examples."""
        base = None
        for part in torch.unique(pairs[0]).split(self.chunk):
            inside = torch.isin(pairs[0], part)
            leaving = pulled.step.leaving((pairs[0][inside], pairs[1][inside]), pulled.product, base)
            base = base or pulled.base(leaving)
            jumps = pulled.step.jumps(leaving, base)
            add_rows(total, leaving.rows, self._read(jumps, pulled, len(leaving.rows)))
        assert base is not None  # noqa: S101 - there are pairs
        return base

    def _read(self, jumps: Jumps, pulled: Pulled, count: int) -> Float[Tensor, "rows queries"]:
        """Compute the inner products of all rows' jumps with the arriving vectors.

        Many blocks go one by one on each thread: their operations are so short that two threads would mostly wait for
        each other. Their sums are added in order, whichever thread took them.
        """
        divisions = self.saturation.divisions(pulled.step.hypers) if self.saturation else {}
        vectors = _Columns(pulled.arriving)
        like = next(iter(pulled.arriving[PARAM].values()))

        def read(block: Coordinates) -> Float[Tensor, "rows queries"]:
            jump = jumps.of(block)
            if self.saturation and (division := divisions.get(block.name)):
                jump = self.saturation.read(block, jump, division)
            if not isinstance(block, Touched):
                return sum_of(moved @ vectors.of(block, slot) for slot, moved in jump.items())
            reads = like.new_zeros((count, len(like)))
            for slot, moved in jump.items():
                own = pulled.arriving[slot][block.name].flatten(2)
                add_rows(reads, block.rows, torch.stack([(moved * one[block.places]).sum(1) for one in own], dim=1))
            return reads

        threads = budget.cores(like.device) if len(jumps.blocks) >= MANY else 1
        return sum_of(iter(spread([read] * threads, jumps.blocks) if threads > 1 else map(read, jumps.blocks)))

    def _add_single(
        self, total: Float[Tensor, "rows queries"], pairs: Pairs, ids: Int[Tensor, " batch"], pulled: Pulled
    ) -> Base:
        """Add the jump of every single example, read with the arriving vectors, to the rows that leave it out."""
        row, position = pairs
        examples, which = torch.unique(ids, return_inverse=True)
        needed = torch.isin(which, which[position])
        single = total.new_zeros((len(examples), total.shape[1]))
        base = self._add_rows(single, (which[needed], needed.nonzero()[:, 0]), pulled)
        # An example that occurs twice in the batch is left out once.
        leaves = torch.unique(torch.stack([row, which[position]]), dim=1)
        add_rows(total, leaves[0], single[leaves[1]])
        return base

    def count_step(self, pulled: Pulled, base: Base | None) -> None:
        """Count this step among the later ones, before the previous step is read."""
        if self.saturation:
            gradient, after = base or pulled.base()
            self.saturation.note(after, gradient, pulled.step.hypers)

    def packed(self) -> dict[str, Tensor]:
        """Return what is carried, by name."""
        return self.saturation.packed() if self.saturation else {}


class _Columns:
    """Query vectors as columns of the coordinates of a block; those of a whole parameter are copied once."""

    def __init__(self, vectors: State) -> None:
        self._vectors = vectors
        self._columns: dict[tuple[str, str], Tensor] = {}

    def of(self, block: Block | Joined, slot: str) -> Float[Tensor, "numbers vectors"]:
        if isinstance(block, Joined):
            return _as_columns(block.of_rows(self._vectors[slot]))
        key = (slot, block.name)
        if key not in self._columns:  # two threads may do so, with the same result
            self._columns[key] = _as_columns(self._vectors[slot][block.name])
        return self._columns[key][block.columns]


def _as_columns(stack: Tensor) -> Float[Tensor, "numbers vectors"]:
    """Copy vectors into columns with the same layout wherever they come from: how a product rounds depends on it."""
    flat = flat_rows(stack).clone(memory_format=torch.contiguous_format)
    return flat.view(-1, 1) if len(flat) == 1 else flat.T.contiguous()
