"""What every row carries backward in place of its displacement, alongside the sweep of one query.

Per-example products H(z)·a are used twice: each row's remainder takes those of its own examples, and their mean is the
H(Z)·a that the query vector needs anyway.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leaveout._util.trees import PARAM, Params, add_rows, each
from leaveout.compute.resources import Resources
from leaveout.diff.operator import Product, StepOperator
from leaveout.sweep import budget
from leaveout.sweep.free_transport import Layout, drift, sketch
from leaveout.sweep.sweep import Sweep
from leaveout.sweep.transports import lazy_vectors, slices
from leaveout.task.training_batch import Window, has_shared_draws, size_of, take
from leaveout.trajectory.left_out import LeftOut
from leaveout.trajectory.recorded_step import RecordedStep

MOST_PAIRS = 2**40


class Remainders:
    """The e_r of all rows: ``⟨bᵀ e_r, g(z)⟩`` is read where z occurs, then ``e_r ← Cᵀ e_r − (1/|Z|) H(z)·a``.

    Args:
        sweep: the run, the curvature, and which occurrences are corrected.
        left_out: the rows.
        resources: memory budget.
        width: keep the remainders in a sketch of this width; None: whole.
    """

    def __init__(self, sweep: Sweep, left_out: LeftOut, resources: Resources, width: int | None = None) -> None:
        rule, params = sweep.trajectory.rule, sweep.trajectory.final()[PARAM]
        self._sweep, self._left_out = sweep, left_out
        self._layout, self._like = Layout(rule, params), next(iter(params.values()))
        self._project = sketch(self._layout, width, self._like) if width else None
        group = (self._project or self._layout).group
        self._rows = lazy_vectors(len(left_out), rule, group, self._like, resources)
        self._most = pair_count(sweep, resources)
        self.disk = self._rows.disk
        self.plain = self._like.new_zeros(len(left_out))
        self.extra = torch.zeros_like(self.plain)
        self.begun = False

    def packed(self) -> dict[str, Tensor]:
        """Return everything gathered so far, to be saved."""
        return {"plain": self.plain, "extra": self.extra, **self._rows.packed()}

    def unpack(self, gathered: dict[str, Tensor]) -> None:
        """Restore what was saved; nothing is saved before the first correction."""
        self.plain, self.extra, self.begun = gathered["plain"], gathered["extra"], True
        self._rows.unpack(gathered)

    def product(self, recorded: RecordedStep, operator: StepOperator, along: Params) -> Product:
        """Compute H(Z)·a and ⟨a, g(z)⟩/|Z| from those of single examples; read and move the remainders with them."""
        pairs = self._left_out.pairs(recorded.record.ids)
        keep = self._sweep.schedule.kept(recorded.record, self._left_out, pairs[0])
        step = drift(self._sweep.trajectory.rule, recorded.record.hypers, operator.objective.l2, self._like)
        self.begun |= keep is None or bool(keep.any())
        if self.begun:
            result = self._corrected(operator, along, pairs, keep, (step.enter, step.carry.mT))
        else:  # nothing has been corrected yet, and nothing is here: SGD-IE's own step
            result = operator.pull(along)
            self._rows.advance(step.carry.mT)
        add_rows(self.plain, pairs[0], result.reads[0, pairs[1]], alpha=-1)
        return result

    def _corrected(
        self,
        operator: StepOperator,
        along: Params,
        pairs: tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]],
        keep: Tensor | None,
        step: tuple[Tensor, Tensor],
    ) -> Product:
        (row, position), (enter, carry), size = pairs, step, size_of(operator.batch)
        vector, flat_vector = each(lambda t: t[0], along), self._layout.flatten(along)[0]
        gradient, mean = (self._like.new_zeros((1, self._layout.width)) for _ in range(2))
        reads = self._like.new_zeros((1, size))
        parts = slices(size, self._most)
        for part in parts:
            gradients, curved = self._of_examples(operator, vector, part)
            gradient += gradients.mean(0, keepdim=True) * (len(gradients) / size)
            mean += curved.mean(0, keepdim=True) * (len(gradients) / size)
            reads[0, part] = gradients @ flat_vector / size
            for some, chosen in self._of_pairs(gradients, position, part, size):
                add_rows(self.extra, row[some], self._rows.read(row[some], enter, chosen), alpha=-1 / size)
        self._rows.advance(carry)
        for part in parts:
            curved = curved if len(parts) == 1 else self._of_examples(operator, vector, part)[1]
            for some, chosen in self._of_pairs(curved, position, part, size):
                terms = chosen if keep is None else chosen * keep[some][:, None].to(chosen)
                self._rows.add(row[some], terms[:, None], alpha=-1 / size)
        whole = each(lambda t: t[0], self._layout.unflatten(gradient))
        return Product(self._layout.unflatten(mean), reads, whole)

    def _of_examples(self, operator: StepOperator, vector: Params, part: slice) -> tuple[Tensor, Tensor]:
        """Compute g(z) and H(z)·a for a part of the batch, one row per example."""
        batch = operator.batch
        size = size_of(batch)
        whole = part.start == 0 and part.stop >= size
        apart = whole and not isinstance(batch, Window) and not has_shared_draws(batch)
        gradients, curved = operator.example_products(batch if apart else take(batch, torch.arange(size)[part]), vector)
        return self._layout.flatten(gradients), self._layout.flatten(curved)

    def _of_pairs(
        self, matrix: Float[Tensor, "part width"], position: Int[Tensor, " pairs"], part: slice, size: int
    ) -> list[tuple[Int[Tensor, " some"], Float[Tensor, "some kept"]]]:
        """List the pairs of a part of the batch, a limited number at a time, with their rows of the matrix, projected.

        There is no copy if these are all rows in order.
        """
        matrix = matrix if self._project is None else self._project(matrix)
        if part.start == 0 and part.stop >= size:
            within = torch.arange(len(position))
        else:
            within = ((position >= part.start) & (position < part.stop)).nonzero()[:, 0]
        chunks = ((some, position[some] - part.start) for some in within.split(self._most) if len(some))
        return [(some, matrix if _is_whole(rows, len(matrix)) else matrix[rows]) for some, rows in chunks]


def pair_count(sweep: Sweep, resources: Resources) -> int:
    """Return how many pairs of rows and examples are processed together."""
    return resources.divided(4).chunk(budget.pair_bytes(sweep.trajectory), MOST_PAIRS)


def _is_whole(rows: Int[Tensor, " some"], size: int) -> bool:
    """Say whether these are all rows in order."""
    return len(rows) == size and torch.equal(rows, torch.arange(size))
