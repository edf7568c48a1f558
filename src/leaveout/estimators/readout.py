"""From displacements of the parameters to changes of the query loss: the last of an estimator's three choices."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jacrev
from torch.utils.data import Dataset

from leaveout._util.trees import PARAM, Params, each, height, inner, nbytes, pullback, split
from leaveout.compute.resources import Resources, shard_rows
from leaveout.errors import InputError, LeaveoutError
from leaveout.scores import MEAN
from leaveout.task import batches
from leaveout.task.batches import Batch
from leaveout.task.elementary import Quicker
from leaveout.task.folding import Folded
from leaveout.task.task import Task
from leaveout.trajectory.stack import LARGE
from leaveout.trajectory.twins import on_threads, twins

BLOCK = 512
BLOCK_BYTES = 200_000_000


def query_fingerprint(task: Task, dataset: Dataset) -> int:
    """Compute a checksum of query examples, in blocks that do not depend on the budget."""
    checksum, size = 0, batches.size(dataset)
    for start in range(0, size, BLOCK):
        block = task.read(range(start, min(start + BLOCK, size)), dataset)
        checksum = zlib.crc32(repr(batches.fingerprint(block)).encode(), checksum)
    return checksum


class Query:
    """The query examples at the final parameters; ``single`` asks for one column per query instead of their mean."""

    def __init__(
        self, task: Task, params: Params, dataset: Dataset, *, single: bool, resources: Resources | None = None
    ) -> None:
        self.task, self.params, self.dataset, self.single = task, params, dataset, single
        self.resources = resources or Resources()
        self.size = batches.size(dataset)
        if self.size == 0:
            raise InputError("The query set is empty: give at least one example to explain.", code="query-empty")
        _check_fit(task, params, dataset)

    @property
    def ids(self) -> tuple[int | str, ...]:
        """The labels of the scores' columns."""
        return tuple(range(self.size)) if self.single else (MEAN,)

    def blocks(self, ids: range | None = None) -> Iterator[Batch]:
        """Yield the query examples, or those with these ids, as many at a time as the budget allows."""
        ids = range(self.size) if ids is None else ids
        for start in range(0, len(ids), self._block):
            yield self.task.read(ids[start : start + self._block], self.dataset)

    @cached_property
    def _block(self) -> int:
        return self.fits(8 * self._footprint, BLOCK)

    @cached_property
    def _footprint(self) -> int:
        """What the forward pass of one query keeps for its backward pass, in bytes."""
        return self.task.footprint(self.params, self.task.read([0], self.dataset))

    @cached_property
    def output_width(self) -> int:
        """The number of outputs of the model for one query example."""
        with torch.no_grad():
            return self.task.outputs(self.params, self.task.read([0], self.dataset))[0].numel()

    def fits(self, bytes_each: int, count: int) -> int:
        """Return how many of ``count`` items of this size fit together; this does not depend on the memory free now."""
        if self.resources.memory == "auto":
            return shard_rows(bytes_each, count)
        return self.resources.chunk(bytes_each, count)

    def check(self) -> None:
        """Refuse query examples that have no finite loss, and name the first."""
        starts = range(0, self.size, self._block)
        parts = [self._checked_losses(range(start, min(start + self._block, self.size))) for start in starts]
        broken = (~torch.isfinite(torch.cat(parts))).nonzero().flatten().tolist()
        if broken:
            raise InputError(
                f"Query example {broken[0]} has no finite loss under the trained model: look for NaN or infinite "
                "values in it, or leave it out.",
                code="query-loss-not-finite",
            )

    def fingerprint(self) -> int:
        """Compute a checksum of the query examples, so that only scores of the same queries are compared."""
        return query_fingerprint(self.task, self.dataset)

    def reduce(self, values: Float[Tensor, "rows examples"]) -> Float[Tensor, "rows queries"]:
        """Reduce per-example values to the requested columns."""
        return values if self.single else values.mean(1, keepdim=True)

    def losses(self, stack: Params) -> Float[Tensor, "rows examples"]:
        """Compute the loss of every query example under every parameter vector of a stack."""
        # As many queries as there are, not as fit, so that rounding does not depend on the budget.
        alone = self._footprint * min(BLOCK, self.size) > LARGE
        losses = self._losses_alone if alone else self._losses_together
        return torch.cat([losses(stack, block) for block in self.blocks()], dim=1)

    def _checked_losses(self, ids: range) -> Float[Tensor, " examples"]:
        """Compute these examples' losses; find one that fails by bisection."""
        try:
            with torch.no_grad():
                return self.task.measures(self.params, self.task.read(ids, self.dataset))
        except Exception as error:
            if len(ids) > 1:
                middle = len(ids) // 2
                return torch.cat([self._checked_losses(ids[:middle]), self._checked_losses(ids[middle:])])
            raise InputError(
                f"Query example {ids[0]} has no loss under the trained model ({str(error).splitlines()[0]}): correct "
                "it or leave it out.",
                code="query-has-no-loss",
            ) from error

    def _losses_together(self, stack: Params, block: Batch) -> Float[Tensor, "rows examples"]:
        """Compute the losses under many small models at a time."""
        footprint = self.task.footprint(self.params, block)
        chunk = min(max(1, BLOCK_BYTES // max(1, footprint)), self.fits(8 * footprint, height(stack)))
        losses = self.task.over_models(self.task.measures, (0, None))
        with Folded():  # nothing here requires gradients, and recurrent layers write in place where none are taken
            return torch.cat([losses(part, block) for part in split(stack, chunk)])

    def _losses_alone(self, stack: Params, block: Batch) -> Float[Tensor, "rows examples"]:
        """Compute the losses under large models, each by itself on a thread."""

        def losses(task: Task, row: int) -> Tensor:
            with torch.no_grad(), Quicker():
                return task.measures(each(lambda tensor: tensor[row], stack), block)

        return torch.stack(on_threads(twins(self.task), losses, range(height(stack))))


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
        scores, bytes_each = Collected(self, query), 8 * nbytes({PARAM: query.task.own(query.params)})
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
        task = query.task
        if query.single:
            return _single(query, range(start, stop), lambda own, one: grad(_block_loss)(own, query, one, 1))
        total: Params | None = None
        for block in query.blocks():
            part = grad(_block_loss)(task.own(query.params), query, block, query.size)
            total = part if total is None else each(torch.add, total, part)
        assert total is not None  # noqa: S101 - a query is never empty
        return each(lambda tensor: tensor.unsqueeze(0), total)

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
            with torch.no_grad():
                outputs, targets = query.task.outputs(query.params, block)
                losses = query.task.over_models(query.task.output_measures, (0, None))
                here = query.task.output_measures(outputs, targets)
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
        there = query.losses({**whole, **each(torch.add, moved, query.task.own(query.params))})
        return query.reduce(there - here)


READOUTS: dict[str, Readout] = {"linear": Linear(), "outputs": Outputs(), "exact": Exact()}


def readout_of(name: str) -> Readout:
    """Return the readout by its name."""
    if name not in READOUTS:
        raise InputError(
            f"readout={name!r} is unknown: use one of {', '.join(map(repr, READOUTS))}.", code="readout-unknown"
        )
    return READOUTS[name]


def _block_loss(own: Params, query: Query, block: Batch, size: int) -> Tensor:
    with query.task.unstopped():
        return query.task.measures({**query.params, **own}, block).sum() / size


def _outputs(query: Query, own: Params, one: Batch) -> Tensor:
    with query.task.unstopped():
        return query.task.outputs({**query.params, **own}, one)[0][0].flatten()


def _some_outputs(query: Query, example: int, first: int, last: int) -> Params:
    """Compute the gradients of some outputs of one example, one row per output."""
    one = query.task.read([example], query.dataset)
    outputs, pull = pullback(lambda own: _outputs(query, own, one), query.task.own(query.params))
    basis = torch.eye(len(outputs), dtype=outputs.dtype, device=outputs.device)[first:last]
    return query.task.over(lambda row: pull(row)[0])(basis)


def _single(query: Query, ids: range, function: Any) -> Params:
    """Stack a function of the parameters for each of these query examples."""
    task = query.task

    def one(example: Batch) -> Params:
        return function(task.own(query.params), batches.map_leaves(lambda leaf: leaf.unsqueeze(0), example))

    parts = [task.over(one)(block) for block in query.blocks(ids)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _check_fit(task: Task, params: Params, dataset: Dataset) -> None:
    """Refuse query examples not built like training examples: the model would fail or, worse, broadcast silently."""
    train, query = batches.leaves(task.read([0])), batches.leaves(task.read([0], dataset))

    def kinds(parts: list[Any]) -> list[tuple[torch.dtype, int]]:
        return [(part.dtype, part.ndim) if isinstance(part, Tensor) else (torch.bool, -1) for part in parts]

    try:
        if kinds(train) != kinds(query):
            raise ValueError("other types or dimensions")
        with torch.no_grad():
            task.measures(params, task.read([0], dataset))
    except LeaveoutError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's model may raise anything on data of another shape
        raise InputError(
            f"The query examples do not fit the model ({str(error).splitlines()[0]}): a training example has "
            f"{_shapes(train)}, a query example {_shapes(query)}; prepare both in the same way.",
            code="query-does-not-fit",
        ) from None


def _shapes(parts: list[Any]) -> str:
    return ", ".join(
        f"{str(p.dtype).removeprefix('torch.')}{list(p.shape[1:])}" if isinstance(p, Tensor) else type(p).__name__
        for p in parts
    )
