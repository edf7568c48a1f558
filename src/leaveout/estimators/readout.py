"""From displacements of the parameters to changes of the query loss: the last of an estimator's three choices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jacrev

from leaveout._util.trees import PARAM, Params, each, height, inner, nbytes, pullback
from leaveout.errors import InputError, UnsupportedError
from leaveout.estimators.query import Query, block_loss
from leaveout.task import batches
from leaveout.task.batches import Batch
from leaveout.task.rewrites.missing_rules import batched


class Readout(ABC):
    """How a displacement becomes a score."""

    @abstractmethod
    def of_displacements(self, query: Query, moved: Params) -> Float[Tensor, "rows queries"]:
        """Compute scores from the displacements themselves."""


class Projected(Readout):
    """A readout that needs only inner products of the displacements with a few vectors: backward sweeps can use it."""

    @abstractmethod
    def width(self, query: Query) -> int:
        """Count the vectors per query, or for the mean of all queries if one vector is enough."""

    @abstractmethod
    def count(self, query: Query) -> int:
        """Count the vectors."""

    @abstractmethod
    def part(self, query: Query, start: int, stop: int) -> Params:
        """Stack the vectors with indices from ``start`` to ``stop``."""

    def vectors(self, query: Query) -> Params:
        """Stack all vectors."""
        return self.part(query, 0, self.count(query))

    def spans(self, query: Query, size: int) -> list[tuple[int, int]]:
        """List ranges of at most ``size`` vectors: those of whole queries, or else parts of a single one."""
        width, count = self.width(query), self.count(query)
        if size >= width:
            step = size - size % width
            return [(start, min(start + step, count)) for start in range(0, count, step)]
        inside = [(start, min(start + size, width)) for start in range(0, width, size)]
        return [(first + start, first + stop) for first in range(0, count, width) for start, stop in inside]

    @abstractmethod
    def of_products(
        self, query: Query, first: int, products: Float[Tensor, "rows vectors"]
    ) -> Iterator[tuple[int, Float[Tensor, "rows some"]]]:
        """Yield what products of whole queries from ``first`` on add to the scores, each with its first column."""

    def of_displacements(self, query: Query, moved: Params) -> Float[Tensor, "rows queries"]:
        """Compute scores from the displacements themselves."""
        scores, bytes_each = Collected(self, query), 8 * nbytes({PARAM: query.task.objective.variables(query.params)})
        for start, stop in self.spans(query, query.fits(bytes_each, self.count(query))):
            scores.add(start, inner(moved, self.part(query, start, stop)))
        return scores.values


class Collected:
    """Reads scores as inner products with a readout's vectors arrive, so that they are never all held at once.

    The products of one query may arrive in several parts. These are held until the last one, and then read.
    """

    def __init__(self, readout: Projected, query: Query) -> None:
        self._readout, self._query = readout, query
        self._values: Tensor | None = None
        self._waiting: Tensor | None = None

    def add(self, start: int, products: Float[Tensor, "rows vectors"]) -> None:
        """Add the inner products with the vectors from index ``start`` on; parts arrive in order."""
        width, count = self._readout.width(self._query), products.shape[1]
        query, first = divmod(start, width)
        if self._values is None:
            self._values = products.new_zeros((len(products), len(self._query.ids)))
        if count < width:
            if self._waiting is None:
                self._waiting = products.new_zeros((len(products), width))
            self._waiting[:, first : first + count] = products
            if first + count < width:
                return
            products, self._waiting = self._waiting, None
        for place, part in self._readout.of_products(self._query, query, products):
            self._values[:, place : place + part.shape[1]] += part

    @property
    def values(self) -> Float[Tensor, "rows queries"]:
        """The scores."""
        assert self._values is not None  # noqa: S101 - a query is never empty
        return self._values


class Linear(Projected):
    """⟨∇L(query, θ_N), δ⟩."""

    def width(self, query: Query) -> int:  # noqa: ARG002 - as for other readouts
        """Return one."""
        return 1

    def count(self, query: Query) -> int:
        """Count one vector per query, or one for their mean."""
        return len(query.ids)

    def part(self, query: Query, start: int, stop: int) -> Params:
        """Compute ∇L of each query, or of their mean."""
        if query.single:
            return _single(query, range(start, stop), partial(_gradient, query))
        return each(lambda tensor: tensor.unsqueeze(0), query.gradient)

    def of_products(
        self,
        query: Query,  # noqa: ARG002 - as for other readouts
        first: int,
        products: Float[Tensor, "rows vectors"],
    ) -> Iterator[tuple[int, Float[Tensor, "rows some"]]]:
        """Yield the products: they are the scores, one column per query."""
        yield first, products


class Outputs(Projected):
    """L(z + J·δ) − L(z): the outputs' change is linear, the loss of the outputs is not."""

    def count(self, query: Query) -> int:
        """Count one vector per output and query."""
        return query.size * self.width(query)

    def part(self, query: Query, start: int, stop: int) -> Params:
        """Compute rows of the outputs' Jacobian: whole examples together, and only the requested rows of the others."""
        width, rows, place = self.width(query), [], start
        while place < stop:
            example, first = divmod(place, width)
            last = min(stop - example * width, width)
            if first == 0 and stop - place >= width:
                many = (stop - place) // width
                jacobians = _single(query, range(example, example + many), jacrev(partial(_outputs, query)))
                rows.append(each(lambda tensor: tensor.flatten(0, 1), jacobians))
                place += many * width
            else:
                rows.append(_some_outputs(query, example, first, last))
                place += last - first
        return {name: torch.cat([part[name] for part in rows]) for name in rows[0]}

    def width(self, query: Query) -> int:
        """Count the outputs of one query."""
        return query.output_width

    def of_products(
        self, query: Query, first: int, products: Float[Tensor, "rows vectors"]
    ) -> Iterator[tuple[int, Float[Tensor, "rows some"]]]:
        """Compute the loss at the moved outputs, minus the loss at the recorded ones."""
        start = 0
        for block in query.blocks(range(first, first + products.shape[1] // self.width(query))):
            with torch.no_grad(), batched():
                outputs, targets = query.task.objective.outputs(query.params, block)
                outputs = query.widened({"": outputs})[""]
                losses = query.task.objective.execution.over_models(query.task.objective.output_measures, (0, None))
                here = query.task.objective.output_measures(outputs, targets)
                stop = start + outputs.numel()
                size = query.fits(8 * outputs.numel() * outputs.element_size(), len(products))
                changes = [
                    losses(outputs + part.unflatten(1, outputs.shape), targets) - here
                    for part in products[:, start:stop].split(size)
                ]
            change, place = torch.cat(changes), first + start // self.width(query)
            yield (place, change) if query.single else (0, change.sum(1, keepdim=True) / query.size)
            start = stop


class Exact(Readout):
    """L(query, θ_N + δ) − L(query, θ_N), which needs δ itself."""

    def of_displacements(self, query: Query, moved: Params) -> Float[Tensor, "rows queries"]:
        """Compute the loss at the moved parameters, minus the loss at the recorded ones."""
        here = query.losses(each(lambda tensor: tensor.unsqueeze(0), query.params))
        whole = {name: tensor.expand(height(moved), *tensor.shape) for name, tensor in query.params.items()}
        recorded = query.widened(query.task.objective.variables(query.params))
        there = query.losses({**whole, **each(torch.add, query.widened(moved), recorded)})
        return query.reduce(there - here)


READOUTS: dict[str, Readout] = {"linear": Linear(), "outputs": Outputs(), "exact": Exact()}


def readout_of(name: str) -> Readout:
    """Return the readout by its name."""
    if name not in READOUTS:
        raise InputError(
            f"readout={name!r} is unknown: use one of {', '.join(map(repr, READOUTS))}.", code="readout-unknown"
        )
    return READOUTS[name]


def _gradient(query: Query, variables: Params, one: Batch) -> Params:
    return grad(block_loss, has_aux=True)(variables, query, one, 1)[0]


def _outputs(query: Query, variables: Params, one: Batch) -> Tensor:
    with query.task.objective.unstopped():
        outputs = query.task.objective.outputs({**query.params, **variables}, one)[0][0].flatten()
    if len(outputs) != query.output_width:
        raise UnsupportedError(
            "The queries have different numbers of outputs, as sequences of several lengths do, and readout='outputs' "
            "needs as many of each: pad all of them to one length, or use another readout.",
            code="outputs-differ",
        )
    return outputs


def _some_outputs(query: Query, example: int, first: int, last: int) -> Params:
    """Compute the gradients of some outputs of one example, one row per output."""
    one = query.task.read([example], query.dataset)
    outputs, pull = pullback(
        lambda variables: _outputs(query, variables, one), query.task.objective.variables(query.params)
    )
    basis = torch.eye(len(outputs), dtype=outputs.dtype, device=outputs.device)[first:last]
    with batched():
        return query.task.objective.execution.over(lambda row: pull(row)[0])(basis)


def _single(query: Query, ids: range, function: Any) -> Params:
    """Stack a function of the parameters for each of these query examples."""
    task = query.task

    def one(example: Batch) -> Params:
        return function(
            task.objective.variables(query.params), batches.map_leaves(lambda leaf: leaf.unsqueeze(0), example)
        )

    with batched():
        parts = [task.objective.execution.over(one)(block) for block in query.blocks(ids)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
