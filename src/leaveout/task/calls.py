"""How derivatives are computed: traced if they recur, in chunks that fit into memory, with operations written out."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

from torch import Tensor

from leaveout._util.trees import Params
from leaveout.compute.threads import spread
from leaveout.errors import UnsupportedError
from leaveout.task.batches import Batch, leaves, map_leaves
from leaveout.task.forms import COUPLED, Form
from leaveout.task.rewrites.missing_rules import WrittenOut
from leaveout.task.rewrites.products import fast_products
from leaveout.task.trace.tracer import WARM_UP
from leaveout.task.training_batch import size_of

if TYPE_CHECKING:
    from leaveout.task.task import Task


def form_of(task: Task, form: Form | None) -> Form:
    """Return the form, or refuse the method if its form is None."""
    if form is None:
        raise no_form(task.abilities.reason)
    return form


def no_form(reason: str) -> UnsupportedError:
    """Return the error for a method that needs a second derivative which no form can compute."""
    if reason == COUPLED:
        return UnsupportedError(
            f"{COUPLED}, so that there is no gradient of one of them alone, which this method needs: use SGDIE(), "
            "TracIn(), ACC(), ACC(transport='exact') or Replay().",
            code="examples-coupled",
        )
    return UnsupportedError(
        f"The derivative of this task's gradient cannot be computed: {reason}. TracIn() and Replay() need none.",
        code="derivative-not-available",
    )


def run(task: Task, name: str, function: Callable, *args: Any, exact: bool = False, warm_up: int = WARM_UP) -> Any:
    """Call a function of nested tensors, by its trace if there is one; ``exact`` keeps every bit."""
    given = function if exact else _written_out(function)
    if not task.abilities.vmap:  # a trace would unroll the loop over examples, which is slow
        return given(*args)
    return task.tracer(_named(task, name), given, *args, exact=exact, warm_up=warm_up)


def staged(task: Task, name: str, function: Callable, shared: tuple, others: tuple) -> Callable | None:
    """Return ``others ↦ function(*shared, *others)``, by a trace in two stages; None if there is no trace."""
    if not task.abilities.vmap:
        return None
    return task.tracer.staged(_named(task, name), _written_out(function), shared, others)


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


def _named(task: Task, name: str) -> str:
    return f"{name} kinks" if task.kinks else name


def _written_out(function: Callable) -> Callable:
    """Wrap a function so that operations are written out; not used around a trace, which it would slow down."""

    def call(*args: Any) -> Any:
        with WrittenOut(), fast_products(*args):
            return function(*args)

    return call


def by_chunks(
    task: Task, name: str, function: Callable, shared: tuple, stacked: tuple, chunk: int | None
) -> tuple[Any, Any]:
    """Call ``function(*shared, *stacked)`` on chunks of the stacked arguments; return a shared and a stacked result."""
    count = len(leaves(stacked)[0])
    if chunk is None or chunk >= count:
        return run(task, name, function, *shared, *stacked)
    joined: list[Tensor] = []
    for start in range(0, count, chunk):
        common, result = run(task, name, function, *shared, *_slice(stacked, start, start + chunk))
        pieces = leaves(result)
        # Small results that are kept between large blocks that are freed would fragment the heap.
        joined = joined or [piece.new_empty((count, *piece.shape[1:])) for piece in pieces]
        for whole, piece in zip(joined, pieces, strict=True):
            whole[start : start + chunk] = piece
    given = iter(joined)
    return common, map_leaves(lambda _: next(given), result)


def _slice(nest: Any, start: int, stop: int) -> Any:
    return map_leaves(lambda leaf: leaf[start:stop], nest)


def ones(params: Params, batch: Batch) -> Tensor:
    """Return a weight of one for every example."""
    return next(iter(params.values())).new_ones(size_of(batch))
