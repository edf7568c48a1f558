"""How a displacement gets from one occurrence of its example to the next without a product per row and step.

The transport V·δ is approximated as a whole: where the batch's curvature is dropped, the example's own is dropped too,
because the two nearly cancel. So what is transported freely collects plain gradients, not corrected ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leaveout._util.trees import PARAM, Params, add_rows, each
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.diff.operator import StepOperator
from leaveout.errors import InputError, UnsupportedError
from leaveout.optim import Rule, values
from leaveout.sweep import budget
from leaveout.sweep.free_transport import Drift, Layout, LazyVectors, drift
from leaveout.sweep.linear_step import Keep
from leaveout.task.training_batch import take
from leaveout.trajectory.recorded_step import RecordedStep
from leaveout.trajectory.trajectory import Trajectory

SAMPLES = 8
"""Steps whose curvature is averaged in a search for directions."""

ROUNDS = 4
"""Rounds of that search."""

EXTRA = 4
"""Directions that are searched for beyond those that are kept."""


@dataclass(frozen=True)
class Subspace:
    """Exact transport on the ``rank`` directions of largest curvature, free transport outside.

    Costs ``rank`` more Hessian-vector products per step, whatever the number of examples.
    """

    rank: int = 8

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(
                f"Subspace(rank={self.rank}) has no directions: give a rank of at least 1.", code="rank-not-a-count"
            )

    def __str__(self) -> str:
        return f"subspace {self.rank}"


def lazy_vectors(
    rows: int, rule: Rule, group: Int[Tensor, " width"], like: Tensor, resources: Resources
) -> LazyVectors:
    """Return a zero vector for each row: in memory if the budget holds them, otherwise in a file, which is slower."""
    needed = rows * len(rule.slots) * len(group) * like.element_size()
    return LazyVectors(rows, len(rule.slots), group, like, disk=needed > resources.divided(4).bytes)


def slices(count: int, size: int) -> list[slice]:
    """Cut ``count`` pairs into chunks of at most ``size``.

    >>> slices(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    return [slice(start, start + size) for start in range(0, count, size)]


class Transport(ABC):
    """Displacements of all rows, known at their own occurrences."""

    def products(self, keep: Keep) -> int:
        """Count the products with the curvature that a step takes."""
        return 1 if keep is None or bool(keep.any()) else 0

    @abstractmethod
    def step(
        self, recorded: RecordedStep, row: Int[Tensor, " pairs"], position: Int[Tensor, " pairs"], size: int, keep: Keep
    ) -> Iterator[tuple[Int[Tensor, " some"], Float[Tensor, "some width"]]]:
        """Yield the rows and H(z)·δ_r for every pair, zero if it is not corrected, at most ``size`` pairs at a time.

        Then the step is taken, without the examples. The gradients that it needs are those of the pairs; if there were
        several chunks of pairs, they were not kept, and are recomputed.
        """

    @abstractmethod
    def advance(self, recorded: RecordedStep) -> None:
        """Take a step in which no row has an example."""


class Free(Transport):
    """No curvature: for plain SGD δ stays put, with momentum it coasts, with decay it shrinks."""

    def __init__(
        self,
        trajectory: Trajectory,
        layout: Layout,
        kind: type[StepOperator],
        rows: int,
        resources: Resources,
        like: Tensor,
    ) -> None:
        self._trajectory, self._layout, self._like = trajectory, layout, like
        self.rows, self.kind, self.resources = rows, kind, resources
        self._vectors = lazy_vectors(rows, trajectory.rule, layout.group, like, resources)

    def step(
        self, recorded: RecordedStep, row: Int[Tensor, " pairs"], position: Int[Tensor, " pairs"], size: int, keep: Keep
    ) -> Iterator[tuple[Int[Tensor, " some"], Float[Tensor, "some width"]]]:
        """Yield H(z)·δ_r for every pair, then take the step."""
        operator = self.kind(recorded.objective, recorded.params, recorded.batch)
        gradients: Params | None = None
        for part in slices(len(row), size):
            vectors = self._layout.unflatten(self.now(row[part]))
            corrected = None if keep is None else keep[part]
            gradients, curved = operator.example_products_where(
                corrected, take(recorded.batch, position[part]), vectors
            )
            yield row[part], self._layout.flatten(curved)
        self.move(recorded, operator, row, position, size, gradients if size >= len(row) else None)

    def advance(self, recorded: RecordedStep) -> None:
        """Take a step."""
        self._vectors.advance(self._drift(recorded).carry)

    def now(self, row: Int[Tensor, " pairs"]) -> Float[Tensor, "pairs width"]:
        """Return the displacement of the parameters of each pair's row."""
        return self._vectors.now(row)[:, 0]

    def move(
        self,
        recorded: RecordedStep,
        operator: StepOperator,
        row: Int[Tensor, " pairs"],
        position: Int[Tensor, " pairs"],
        size: int,
        gradients: Params | None = None,
    ) -> None:
        """Take the step, and remove the pairs' examples; their gradients may be given."""
        step = self._drift(recorded)
        self._vectors.advance(step.carry)
        enter = step.enter[self._layout.group].T / -len(recorded.record.ids)  # slots x width
        for part in slices(len(row), size):
            leaving = gradients or operator.example_gradients(take(recorded.batch, position[part]))
            self._vectors.add(row[part], self._layout.flatten(leaving)[:, None] * enter)

    def _drift(self, recorded: RecordedStep) -> Drift:
        return drift(self._trajectory.rule, recorded.record.hypers, self._trajectory.objective.l2, self._like)


class SubspaceTransport(Transport):
    """δ = d + Qᵀ(z − Q·d): d is transported freely, z = Q·δ by the exact step within the span of Q's rows."""

    def __init__(self, trajectory: Trajectory, layout: Layout, free: Free, basis: Float[Tensor, "rank width"]) -> None:
        self._trajectory, self._layout, self._free, self._basis = trajectory, layout, free, basis
        shape = (free.rows, len(basis))
        self._inside = {slot: basis.new_zeros(shape) for slot in trajectory.rule.slots}

    def products(self, keep: Keep) -> int:
        """Count the products of a step, including one per direction of the subspace."""
        return len(self._basis) + 2 * super().products(keep)

    def step(
        self, recorded: RecordedStep, row: Int[Tensor, " pairs"], position: Int[Tensor, " pairs"], size: int, keep: Keep
    ) -> Iterator[tuple[Int[Tensor, " some"], Float[Tensor, "some width"]]]:
        """Yield H(z)·δ_r for every pair, then take the step."""
        operator = self._free.kind(recorded.objective, recorded.params, recorded.batch)
        terms, gradients = [], None
        for part in slices(len(row), size):
            rows, places = row[part], position[part]
            outside, inside = self._free.now(rows), self._inside[PARAM][rows] @ self._basis
            moved = outside + inside - outside @ self._basis.T @ self._basis
            twice = None if keep is None else torch.cat([keep[part], keep[part]])
            vectors = self._layout.unflatten(torch.cat([moved, inside]))
            examples = take(recorded.batch, torch.cat([places, places]))
            both, curved = operator.example_products_where(twice, examples, vectors)
            gradients = each(lambda t: t[: len(t) // 2], both)
            of_moved, of_inside = self._layout.flatten(curved).chunk(2)
            terms.append((of_inside + self._layout.flatten(gradients)) @ self._basis.T)
            yield rows, of_moved
        self._move(recorded, row, torch.cat(terms))
        self._free.move(recorded, operator, row, position, size, gradients if size >= len(row) else None)

    def advance(self, recorded: RecordedStep) -> None:
        """Take a step."""
        nobody = torch.zeros(0, dtype=torch.int64)
        self._move(recorded, nobody, self._basis.new_zeros((0, len(self._basis))))
        self._free.advance(recorded)

    def _move(self, recorded: RecordedStep, row: Int[Tensor, " pairs"], terms: Float[Tensor, "pairs rank"]) -> None:
        """Take the optimizer's own step on the coordinates z, with the batch's curvature within the span."""
        hypers, rule = recorded.record.hypers, self._trajectory.rule
        if any(hyper != hypers[0] for hyper in hypers):
            raise UnsupportedError(
                "Subspace transport needs the same hyperparameters for all parameters, and this run's groups differ: "
                "use ACC(transport='free').",
                code="hyperparameters-differ",
            )
        chunk = budget.chunk(self._free.resources.divided(4), self._trajectory, len(self._basis))
        operator = self._free.kind(recorded.objective, recorded.params, recorded.batch)
        rule = rule.beside(recorded.params, recorded.objective.names)
        parts = [self._layout.unflatten(part) for part in self._basis.split(chunk)]
        bent = (rule.bent(recorded.params, part, hypers) for part in parts)
        products = (each(torch.add, operator.pull(part).curved, own) for part, own in zip(parts, bent, strict=True))
        curved = torch.cat([self._layout.flatten(product) @ self._basis.T for product in products])
        gradient = self._inside[PARAM] @ curved
        add_rows(gradient, row, terms, alpha=-1 / len(recorded.record.ids))
        self._inside = rule.step_parameter(rule.definition.step, self._inside, gradient, values(hypers[0]))


def top_directions(
    trajectory: Trajectory, layout: Layout, kind: type[StepOperator], rank: int, resources: Resources, cost: Cost
) -> Float[Tensor, "rank width"]:
    """Return orthonormal rows that span the top eigenvectors of H̄, the mean batch Hessian at evenly spaced steps.

    They come from subspace iteration ``Q ← orth(H̄ Q)`` from a seeded random start, with a few more directions than are
    kept.
    """
    count = min(len(trajectory), SAMPLES)
    chosen = {round(i) for i in torch.linspace(0, len(trajectory) - 1, count).tolist()}
    width = min(rank + EXTRA, layout.width)
    held = budget.directions_bytes(trajectory, width, len(chosen))
    budget.check(resources, trajectory, held, f"the search for {width} directions")
    chunk = budget.chunk(resources.without(held), trajectory, width)
    operators = [_operator(trajectory, index, kind) for index in sorted(chosen)]
    like = next(iter(operators[0].params.values()))
    start = torch.randn(layout.width, width, generator=torch.Generator().manual_seed(0))
    product = start.to(like)
    del start
    for _ in resources.track(range(ROUNDS + 1), ROUNDS + 1, "finding directions"):
        basis = torch.linalg.qr(product)[0]
        product = torch.zeros_like(basis)
        for operator in operators:
            for place in range(0, width, chunk):
                columns = layout.unflatten(basis[:, place : place + chunk].T)
                product[:, place : place + chunk] += layout.flatten(operator.pull(columns).curved).T
        product /= len(operators)
    cost.hvps += search_products(width, len(trajectory))
    # Pick the most curved directions: the eigenvectors of H̄ within the span.
    values, vectors = torch.linalg.eigh(basis.T @ product)
    return (basis @ vectors[:, values.abs().argsort(descending=True)[:rank]]).T


def search_products(width: int, steps: int) -> int:
    """Count the products of a search for this many directions in a run of this many steps.

    >>> search_products(12, 2), search_products(12, 8) == search_products(12, 1000)
    (120, True)
    """
    return (ROUNDS + 1) * width * min(steps, SAMPLES)


def _operator(trajectory: Trajectory, index: int, kind: type[StepOperator]) -> StepOperator:
    """Return the operator of one step; nothing else of the step is kept."""
    recorded = trajectory.recorded_step(index)
    return kind(recorded.objective, recorded.params, recorded.batch)
