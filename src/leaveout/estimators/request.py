"""A checked question with what is needed to answer it, and the ways to do so: by rows, or by query vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout._util.trees import Params
from leaveout.compute import progress
from leaveout.compute.cost import Cost
from leaveout.compute.jobs import Shard, Shelf, completed
from leaveout.compute.resources import VECTORS, Resources, return_memory
from leaveout.errors import MismatchError
from leaveout.estimators.query import Query
from leaveout.estimators.readout import Collected, Projected
from leaveout.scores import UNIT, Scores, sign_of
from leaveout.sweep import budget
from leaveout.task.measures import unit_of
from leaveout.trajectory.identity import identity
from leaveout.trajectory.left_out import LeftOut
from leaveout.trajectory.trajectory import Trajectory

T = TypeVar("T")

Swept: TypeAlias = Callable[[LeftOut, Params, Resources, Cost], Any]
"""What computes the inner products of all rows' displacements with a stack of vectors."""

COPIES = 4
"""How many columns with one number per row are held per query vector: plain and corrected sums, and copies."""


@dataclass(frozen=True)
class Request:
    """A checked question, with the trajectory and the query that are needed to answer it."""

    trajectory: Trajectory
    left_out: LeftOut
    query: Query
    resources: Resources
    cost: Cost
    displacements: bool
    method: str

    def shards(
        self, function: Callable[[Request, T], dict[str, Tensor]], items: Sequence[T], words: Sequence[str], what: str
    ) -> Iterator[dict[str, Tensor]]:
        """Yield ``function(request, item)`` for every item, wherever the engine runs it; ``words`` identify items."""
        keys = [f"{self._identity} {what} {word}" for word in words] if self.resources.work is not None else []
        inside, elsewhere = replace(self, resources=self.resources.inside()), self.resources.elsewhere
        shelf = Shelf(self.resources, keys)

        def work(item_with_checkpoint: tuple[T, Path | None]) -> Shard:
            item, checkpoint = item_with_checkpoint
            request = replace(inside, cost=Cost(), resources=inside.resources.with_checkpoint(checkpoint))
            with ExitStack() as metered:
                if elsewhere:  # another process, whose cost is not counted elsewhere
                    metered.enter_context(request.cost.metered(request.trajectory.task.device))
                tensors = function(request, item)
            if request.resources.memory != "auto":  # a fragmented heap grows from shard to shard
                return_memory()
            return Shard(tensors, request.cost)

        if elsewhere:
            for shard in completed(self.resources, work, items, keys, what):
                yield self._counted(shard)
            return
        for place, item in enumerate(self.resources.watch(items, len(items))):
            stored = shelf.find(place)
            if stored is None:
                with progress.part(place, len(items)):
                    stored = work((item, shelf.checkpoint(place)))
                shelf.keep(place, stored)
            yield self._counted(stored)

    def _counted(self, shard: Shard) -> dict[str, Tensor]:
        """Return a shard's tensors, and count its cost."""
        self.cost.hvps += shard.cost.hvps
        self.cost.gradients += shard.cost.gradients
        self.cost.peak_memory = max(self.cost.peak_memory, shard.cost.peak_memory)
        return shard.tensors

    @cached_property
    def _identity(self) -> str:
        """Everything that the scores depend on, except the rows."""
        query = self.query
        question = (self.method, query.fingerprint(), query.single, self.displacements)
        return identity(self.trajectory.run, query.task, query.params, *question)

    def rows(
        self,
        function: Callable[[Request], tuple[Tensor, Params | None]],
        bytes_each: int,
        what: str,
        least: int | None = None,
    ) -> tuple[Tensor, Params | None]:
        """Return scores and displacements of all rows, by shards; ``function`` computes those of a request's rows.

        ``least`` is the memory in bytes that one row needs, if not its own and that of a product.
        """
        self.resources.check(least or bytes_each + budget.product_bytes(self.trajectory), "one row")
        parts = list(self.left_out.chunks(self.resources.shard_size(2 * bytes_each, len(self.left_out))))

        def work(request: Request, part: LeftOut) -> dict[str, Tensor]:
            values, moved = function(replace(request, left_out=part))
            return {"values": values, **{f"moved/{name}": tensor for name, tensor in (moved or {}).items()}}

        shards = list(self.shards(work, parts, [part.identity() for part in parts], what))
        values = torch.cat([one["values"] for one in shards])
        return values, _moved(shards) if self.displacements else None

    def columns(
        self,
        function: Swept,
        readout: Projected,
        *,
        alone: bool = False,
        vector_bytes: int | None = None,
    ) -> dict[str, Tensor]:
        """Read scores from the inner products with a readout's vectors that ``function`` returns, by shards of vectors.

        It returns one kind of products, or several in a named tuple; so does this, by name.

        As many vectors are computed and transported at a time as the budget allows, and their products are read
        together. ``alone`` says that each vector has its own sweep, and thus its own shard; ``vector_bytes`` how many
        bytes a vector needs, if not those of a sweep.
        """
        column = len(self.left_out) * next(iter(self.query.params.values())).element_size()
        bytes_each = (vector_bytes or budget.backward_bytes(self.trajectory)) + COPIES * column
        budget.check(self.resources, self.trajectory, bytes_each, "one query vector")
        size = self.resources.shard_size(2 * bytes_each, readout.count(self.query), VECTORS)
        if alone and not self.resources.whole:
            size = 1
        parts = readout.spans(self.query, size)
        width = readout.width(self.query)
        if size < width:
            budget.check(self.resources, self.trajectory, bytes_each + COPIES * width * column, "one query's outputs")
        words = [f"{self.left_out.identity()} vectors {start} to {stop}" for start, stop in parts]

        def work(request: Request, part: tuple[int, int]) -> dict[str, Tensor]:
            vectors = readout.part(request.query, *part)
            return _named(function(request.left_out, vectors, request.resources, request.cost))

        collected: dict[str, Collected] = {}
        for (start, _), tensors in zip(parts, self.shards(work, parts, words, "sweeping"), strict=True):
            for name in list(tensors):
                collected.setdefault(name, Collected(readout, self.query)).add(start, tensors.pop(name))
        return {name: scores.values for name, scores in collected.items()}

    def scores(self, method: str, values: Float[Tensor, "rows queries"], moved: Params | None = None) -> Scores:
        """Return the values with everything that is needed to interpret them."""
        check_finite(values, self.left_out)
        fingerprint = self.query.fingerprint()
        return Scores(
            values,
            self.left_out.names,
            self.query.ids,
            method,
            self.cost,
            moved,
            query_fingerprint=fingerprint,
            sign=sign_of(self.query.task.measure),
            unit=unit_of(self.query.task.measure) or UNIT,
            groups=self.left_out.named(),
            run_fingerprint=self.trajectory.run.fingerprint,
            precision=self.trajectory.run.precision,
            held=self.trajectory.run.held,
        )


def _named(products: Any) -> dict[str, Tensor]:
    return {"products": products} if isinstance(products, Tensor) else products._asdict()


def check_finite(values: Float[Tensor, "rows queries"], left_out: LeftOut) -> None:
    """Refuse scores that overflowed."""
    if not bool(torch.isfinite(values).all()):
        row = int((~torch.isfinite(values)).nonzero()[0, 0])
        raise MismatchError(
            f"The score of {left_out.names[row]!r} is not finite: the recurrence overflowed; train with a smaller "
            "learning rate, or score an earlier part of the run.",
            code="score-not-finite",
        )


def _moved(shards: list[dict[str, Tensor]]) -> Params:
    """Join all rows' displacements; each shard's are freed as they are joined, since they may be gigabytes."""
    names = [name for name in shards[0] if name.startswith("moved/")]
    return {name.removeprefix("moved/"): torch.cat([one.pop(name) for one in shards]) for name in names}
