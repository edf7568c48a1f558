"""The query examples at the parameters that are scored: their losses, checked, and the gradient of their mean."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad
from torch.utils.data import Dataset

from leaveout._util.trees import Params, each, height, split
from leaveout.compute.resources import Resources, shard_rows
from leaveout.errors import InputError, LeaveoutError
from leaveout.scores import MEAN
from leaveout.task import batches
from leaveout.task.batches import Batch
from leaveout.task.footprint import activation_bytes
from leaveout.task.measures import check_classes
from leaveout.task.objective import Objective
from leaveout.task.rewrites.elementary import Quicker
from leaveout.task.rewrites.folding import Folded
from leaveout.task.rewrites.missing_rules import batched
from leaveout.task.rewrites.products import fast_products
from leaveout.task.task import Task
from leaveout.trajectory.stack import LARGE
from leaveout.trajectory.twins import on_threads, twins

BLOCK = 512
BLOCK_BYTES = 200_000_000


def query_fingerprint(task: Task, dataset: Dataset) -> int:
    """Compute a checksum of query examples, in blocks that do not depend on the budget."""
    checksum = 0
    for ids in task.queries.chunks(dataset, range(batches.size(dataset)), BLOCK):
        checksum = zlib.crc32(repr(batches.fingerprint(task.read(ids, dataset))).encode(), checksum)
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
        for some in self._chunks(range(self.size) if ids is None else ids):
            yield self.task.read(some, self.dataset)

    def _chunks(self, ids: range) -> Iterator[range]:
        return self.task.queries.chunks(self.dataset, ids, self._block)

    @cached_property
    def _block(self) -> int:
        return self.fits(8 * self._footprint, BLOCK)

    @cached_property
    def _footprint(self) -> int:
        """What the forward pass of one query keeps for its backward pass, in bytes."""
        return activation_bytes(self.task.objective, self.params, self.task.read([0], self.dataset))

    @cached_property
    def output_width(self) -> int:
        """The number of outputs of the model for one query example."""
        with torch.no_grad():
            return self.task.objective.outputs(self.params, self.task.read([0], self.dataset))[0].numel()

    def fits(self, bytes_each: int, count: int) -> int:
        """Return how many of ``count`` items of this size fit together; this does not depend on the memory free now."""
        if self.resources.memory == "auto":
            return shard_rows(bytes_each, count)
        return self.resources.chunk(bytes_each, count)

    def check(self, *, gradient: bool = False) -> None:
        """Refuse query examples that have no finite loss, and name the first.

        With ``gradient``, the pass that computes the gradient of the mean loss, which will be needed, serves for both.
        """
        losses = self._losses_with_gradient() if gradient and not self.single else None
        if losses is None:
            losses = torch.cat([self._checked_losses(ids) for ids in self._chunks(range(self.size))])
        broken = (~torch.isfinite(losses)).nonzero().flatten().tolist()
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
        """Compute the loss of every query example under every parameter vector of a stack.

        Differences between these are the scores, so a model of 16 bits is evaluated in 32.
        """
        stack = self.widened(stack)
        # As many queries as there are, not as fit, so that rounding does not depend on the budget.
        alone = self._footprint * min(BLOCK, self.size) > LARGE
        losses = self._losses_alone if alone else self._losses_together
        return torch.cat([losses(stack, block) for block in self.blocks()], dim=1)

    def widened(self, params: Params) -> Params:
        """Return parameters in the dtype in which losses are computed."""
        return params if self._precise is self.task.objective else batches.converted(params, torch.float32)

    @cached_property
    def _precise(self) -> Objective:
        return self.task.objective.at_least_single()

    @property
    def gradient(self) -> Params:
        """The gradient of the mean loss of all query examples, computed once."""
        return self._mean[1]

    @cached_property
    def _mean(self) -> tuple[Float[Tensor, " examples"], Params]:
        """The losses of all query examples, and the gradient of their mean."""
        losses, total = [], None
        for block in self.blocks():
            part, values = grad(block_loss, has_aux=True)(
                self.task.objective.variables(self.params), self, block, self.size
            )
            losses.append(values.detach())
            total = part if total is None else each(torch.add, total, part)
        assert total is not None  # noqa: S101 - a query is never empty
        return torch.cat(losses), total

    def _losses_with_gradient(self) -> Float[Tensor, " examples"] | None:
        """Compute all losses in the pass that takes their gradient; None if that fails, without saying for which."""
        try:
            return self._mean[0]
        except LeaveoutError:
            raise
        except Exception:  # noqa: BLE001 - the user's model may raise anything
            return None

    def _checked_losses(self, ids: range) -> Float[Tensor, " examples"]:
        """Compute these examples' losses; find one that fails by bisection."""
        try:
            with torch.no_grad():
                return self.task.objective.measures(self.params, self.task.read(ids, self.dataset))
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
        footprint = activation_bytes(self.task.objective, self.params, block)
        chunk = min(max(1, BLOCK_BYTES // max(1, footprint)), self.fits(8 * footprint, height(stack)))
        losses = self._precise.execution.over_models(self._precise.measures, (0, None))
        with (
            batched(),
            Folded(),
        ):  # nothing here requires gradients, and recurrent layers write in place where none are taken
            return torch.cat([losses(part, block) for part in split(stack, chunk)])

    def _losses_alone(self, stack: Params, block: Batch) -> Float[Tensor, "rows examples"]:
        """Compute the losses under large models, each by itself on a thread."""

        def losses(objective: Objective, row: int) -> Tensor:
            params = each(lambda tensor: tensor[row], stack)
            with torch.no_grad(), Quicker(), fast_products(params, block):
                return objective.measures(params, block)

        return torch.stack(on_threads(twins(self._precise), losses, range(height(stack))))


def block_loss(variables: Params, query: Query, block: Batch, size: int) -> tuple[Tensor, Tensor]:
    """Compute a block's part of the mean loss, and its examples' losses."""
    with query.task.objective.unstopped():
        losses = query.task.objective.measures({**query.params, **variables}, block)
    return losses.sum() / size, losses


def _check_fit(task: Task, params: Params, dataset: Dataset) -> None:
    """Refuse query examples not built like training examples: the model would fail or, worse, broadcast silently."""
    train, query = batches.leaves(task.read([0])), batches.leaves(task.read([0], dataset))

    def kinds(parts: list[Any]) -> list[tuple[torch.dtype, int]]:
        return [(part.dtype, part.ndim) if isinstance(part, Tensor) else (torch.bool, -1) for part in parts]

    try:
        if kinds(train) != kinds(query):
            raise ValueError("other types or dimensions")
        with torch.no_grad():
            outputs, targets = task.objective.outputs(params, task.read([0], dataset))
            if task.measure != "loss":
                losses = task.objective.output_losses(outputs, targets)
                check_classes(task.measure, task.loss, outputs, targets, losses)
            task.objective.output_measures(outputs, targets)
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
