"""How derivatives are computed: traced if they recur, in chunks that fit into memory, with operations written out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from threading import Lock
from typing import Any

from torch import Tensor

from leaveout._util.trees import Params
from leaveout.compute.threads import spread
from leaveout.task.batches import Batch, leaves, map_leaves
from leaveout.task.objective import Objective
from leaveout.task.rewrites.missing_rules import batched
from leaveout.task.rewrites.products import fast_products
from leaveout.task.trace.tracer import WARM_UP
from leaveout.task.training_batch import size_of


def run(
    objective: Objective, name: str, function: Callable, *args: Any, exact: bool = False, warm_up: int = WARM_UP
) -> Any:
    """Call a function of nested tensors, by its trace if there is one; ``exact`` keeps every bit."""
    if objective.abilities.vmap:  # otherwise a trace would unroll the loop over examples, which is slow
        given = function if exact else _written_out(function)
        trace = objective.execution.tracer.find(_named(objective, name), given, args, exact=exact, warm_up=warm_up)
        if trace is not None:
            return trace(*args)
    with nullcontext() if exact else batched(), nullcontext() if exact else fast_products(*args):
        return function(*args)


def staged(objective: Objective, name: str, function: Callable, shared: tuple, others: tuple) -> Callable | None:
    """Return ``others ↦ function(*shared, *others)``, by a trace in two stages; None if there is no trace."""
    if not objective.abilities.vmap:
        return None
    return objective.execution.tracer.staged(_named(objective, name), _written_out(function), shared, others)


def stacked(function: Callable[[int], Any], count: int, threads: int) -> Any:
    """Call a function for each row, one row per thread at a time, and stack the results."""
    whole: list[Tensor] = []
    begun = Lock()

    def into(row: int) -> Any:
        result = function(row)
        parts = leaves(result)
        with begun:
            if not whole:  # each result is copied into the stack at once, so that none is held twice
                whole.extend(part.new_empty((count, *part.shape)) for part in parts)
        for stack, part in zip(whole, parts, strict=True):
            stack[row] = part
        return map_leaves(lambda _: 0, result)

    rows = range(count)
    # A single row at a time is computed with all of PyTorch's threads.
    nest, *_ = spread([into] * threads, rows) if threads > 1 else map(into, rows)
    given = iter(whole)
    return map_leaves(lambda _: next(given), nest)


def by_chunks(
    objective: Objective, name: str, function: Callable, shared: tuple, stacked: tuple, size: int | None = None
) -> tuple[Any, Any]:
    """Call ``function(*shared, *stacked)`` on chunks of the stacked arguments; return a shared and a stacked result."""
    count, chunk = len(leaves(stacked)[0]), size or objective.execution.chunks.vectors
    if chunk is None or chunk >= count:
        return run(objective, name, function, *shared, *stacked)
    joined: list[Tensor] = []
    for start in range(0, count, chunk):
        common, result = run(objective, name, function, *shared, *_slice(stacked, start, start + chunk))
        pieces = leaves(result)
        # Small results that are kept between large blocks that are freed would fragment the heap.
        joined = joined or [piece.new_empty((count, *piece.shape[1:])) for piece in pieces]
        for whole, piece in zip(joined, pieces, strict=True):
            whole[start : start + chunk] = piece
    given = iter(joined)
    return common, map_leaves(lambda _: next(given), result)


def ones(params: Params, batch: Batch) -> Tensor:
    """Return a weight of one for every example."""
    return next(iter(params.values())).new_ones(size_of(batch))


def _named(objective: Objective, name: str) -> str:
    return f"{name} kinks" if objective.mode.kinks else name


def _written_out(function: Callable) -> Callable:
    """Wrap a function so that operations are written out; not used around a trace, which it would slow down."""

    def call(*args: Any) -> Any:
        with batched(), fast_products(*args):
            return function(*args)

    return call


def _slice(nest: Any, start: int, stop: int) -> Any:
    return map_leaves(lambda leaf: leaf[start:stop], nest)
