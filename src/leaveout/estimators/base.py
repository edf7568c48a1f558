"""What every estimator shares: the call, its checks, and the account of what it cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.data import Dataset, Subset

from leaveout._util.allocator import kept_memory, returned
from leaveout._util.trees import Params
from leaveout.compute.cost import Cost
from leaveout.compute.jobs import Shard, completed
from leaveout.compute.resources import VECTORS, Resources
from leaveout.errors import MismatchError
from leaveout.estimators.question import Question
from leaveout.estimators.readout import Collected, Projected, Query
from leaveout.run.model_match import warn_of_other_weights
from leaveout.run.reader import Run
from leaveout.scores import UNIT, Scores
from leaveout.sweep import budget
from leaveout.task.measures import unit_of
from leaveout.task.task import Task
from leaveout.trajectory.identity import identity
from leaveout.trajectory.left_out import Groups, LeftOut, leave_out
from leaveout.trajectory.trajectory import Trajectory

T = TypeVar("T")

COPIES = 4
"""How many columns with a number for each row are held for a query vector: plain and corrected sums, and copies."""


@dataclass(frozen=True)
class Request:
    """A question, checked, with what answers it opened."""

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
        """Yield ``function(request, item)`` of every item, wherever the engine does it; ``words`` tell items apart."""
        keys = [f"{self._identity} {what} {word}" for word in words] if self.resources.work is not None else []
        inside, elsewhere = replace(self, resources=self.resources.inside()), self.resources.elsewhere

        def work(given: tuple[T, Path | None]) -> Shard:
            item, checkpoint = given
            own = replace(inside, cost=Cost(), resources=inside.resources.with_checkpoint(checkpoint))
            with ExitStack() as metered:
                if elsewhere:  # another process, which nobody else accounts for
                    metered.enter_context(own.cost.metered())
                    metered.enter_context(kept_memory())
                tensors = function(own, item)
            if own.resources.memory != "auto":  # a heap in pieces grows from shard to shard
                returned()
            return Shard(tensors, own.cost)

        for shard in completed(self.resources, work, items, keys, what):
            self.cost.hvps += shard.cost.hvps
            self.cost.gradients += shard.cost.gradients
            self.cost.peak_memory = max(self.cost.peak_memory, shard.cost.peak_memory)
            yield shard.tensors

    @cached_property
    def _identity(self) -> str:
        """Everything that the scores depend on, but for the rows."""
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
        """Return scores and displacements of all rows, by shards; ``function`` has those of a request's rows.

        ``least`` says how many bytes one row needs, if not its own and those of a product.
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
        function: Callable[[Request, Params], dict[str, Tensor]],
        readout: Projected,
        *,
        alone: bool = False,
        vector_bytes: int | None = None,
    ) -> dict[str, Tensor]:
        """Read scores from the inner products with a readout's vectors that ``function`` gives, by shards of them.

        As many vectors are made and carried at a time as the budget holds, and their products are read at once.
        ``alone`` says that each has a sweep of its own, and gets a shard of its own; ``vector_bytes`` how many bytes a
        vector needs, if not those of a sweep.
        """
        column = len(self.left_out) * next(iter(self.query.params.values())).element_size()
        bytes_each = (vector_bytes or budget.backward_bytes(self.trajectory)) + COPIES * column
        budget.check(self.resources, self.trajectory, bytes_each, "one query vector")
        size = self.resources.shard_size(2 * bytes_each, readout.count(self.query), VECTORS)
        if alone and not self.resources.whole:
            size = 1
        parts = readout.spans(self.query, size)
        if size < (width := readout.width(self.query)):
            budget.check(self.resources, self.trajectory, bytes_each + COPIES * width * column, "one query's outputs")
        words = [f"{self.left_out.identity()} vectors {start} to {stop}" for start, stop in parts]

        def work(request: Request, part: tuple[int, int]) -> dict[str, Tensor]:
            return function(request, readout.part(request.query, *part))

        collected: dict[str, Collected] = {}
        for (start, _), tensors in zip(parts, self.shards(work, parts, words, "sweeping"), strict=True):
            for name in list(tensors):
                collected.setdefault(name, Collected(readout, self.query)).add(start, tensors.pop(name))
        return {name: scores.values for name, scores in collected.items()}

    def scores(self, method: str, values: Float[Tensor, "rows queries"], moved: Params | None = None) -> Scores:
        """Return the values with everything that they need to be understood."""
        if not bool(torch.isfinite(values).all()):
            row = int((~torch.isfinite(values)).nonzero()[0, 0])
            raise MismatchError(
                f"The score of {self.left_out.names[row]!r} is not finite: the recurrence overflowed; train with a "
                "smaller learning rate, or score an earlier part of the run.",
                code="score-not-finite",
            )
        fingerprint = self.query.fingerprint()
        return Scores(
            values,
            self.left_out.names,
            self.query.ids,
            method,
            self.cost,
            moved,
            query_fingerprint=fingerprint,
            unit=unit_of(self.query.task.measure) or UNIT,
            groups=self.left_out.named(),
            run_fingerprint=self.trajectory.run.fingerprint,
            precision=self.trajectory.run.precision,
        )


class Estimator(ABC):
    """Scores every training example of a recorded run; subclasses say how."""

    layers: str | Sequence[str] | None = None
    """The parameters whose displacements count, by name or pattern; None: all."""

    differentiates: ClassVar[bool] = True
    """Whether derivatives beyond training's own are taken, which are compared first at the run's last state."""

    def __post_init__(self) -> None:
        """Make tuples of lists: an estimator can be compared, and found in a dictionary."""
        for option, value in list(vars(self).items()):
            if isinstance(value, list | np.ndarray | Tensor):
                entries = value if isinstance(value, list) else value.tolist()
                object.__setattr__(self, option, tuple(entries) if isinstance(entries, list) else entries)

    @property
    def unit(self) -> str:
        """What the scores are counted in."""
        return UNIT

    @property
    @abstractmethod
    def name(self) -> str:
        """The method's name, as the scores carry it."""

    def score(
        self,
        run: Run,
        task: Task,
        query: Dataset,
        *,
        queries: str = "mean",
        ids: Sequence[int] | None = None,
        groups: Groups | None = None,
        displacements: bool = False,
        resources: Resources | None = None,
        at: int | str | None = None,
    ) -> Scores:
        """Estimate how the query loss would change without each training example.

        Args:
            run: the recorded run.
            task: what was trained.
            query: the examples whose loss is explained, built like training examples.
            queries: ``"mean"`` for their mean loss, ``"each"`` for a column each.
            ids: the examples to score; all of them by default.
            groups: leave these out together instead: lists of ids, or a dict of names to lists.
            displacements: keep each row's parameter displacement as ``scores.displacements``.
            resources: memory budget and progress.
            at: score the model after this many steps (the best checkpoint, say) and not the last one: the scores are
                those of ``run.head(at)``, which ``verify`` and the like then need.
        """
        resources = resources or Resources()
        return self.answer(Question(run, task, query, queries, ids, groups, displacements, resources, at))

    def answer(self, question: Question) -> Scores:
        """Estimate what ``score`` does, for a question that is one value."""
        chosen = self.resolved(question.run, question.task, displacements=question.displacements)
        request = chosen.request(question)
        with request.cost.metered(), kept_memory():
            values, moved = chosen._values(request)
        scores = request.scores(chosen.name, values, moved)
        unit = scores.unit if self.unit == UNIT else self.unit
        return replace(scores, unit=unit, exact=chosen._exact(values))

    def self_influence(
        self,
        run: Run,
        task: Task,
        *,
        ids: Sequence[int] | None = None,
        resources: Resources | None = None,
    ) -> Scores:
        """Estimate how each training example's loss would change without it: high for what was memorised.

        The diagonal of the scores of the training set for itself, taken a block at a time. Costs as much as a query
        for each example; TracIn of checkpoints takes two gradients of each example at each of them.

        Args:
            run: the recorded run.
            task: what was trained.
            ids: the examples to score; all of them by default.
            resources: memory budget and progress.
        """
        resources, chosen = resources or Resources(), self.resolved(run, task)
        everyone = leave_out(task.size, ids)
        bytes_each = 2 * budget.backward_bytes(Trajectory(run, task, self.layers))
        values, cost = [], Cost()
        for part in everyone.chunks(resources.part(bytes_each, len(everyone))):
            own = Subset(task.train_set, part.examples.tolist())
            request = replace(chosen.request(Question(run, task, own, "each", resources=resources)), left_out=part)
            with request.cost.metered(), kept_memory():
                values.append(chosen._diagonal(request))
            cost = cost + request.cost
        return Scores(
            torch.cat(values)[:, None],
            everyone.names,
            ("self",),
            chosen.name,
            cost,
            unit=self.unit,
            precision=run.precision,
            run_fingerprint=run.fingerprint,
        )

    def _diagonal(self, request: Request) -> Float[Tensor, " rows"]:
        """Estimate each row's effect on the query of the same number."""
        return self._values(request)[0].diagonal()

    def resolved(self, _run: Run, _task: Task | None = None, *, displacements: bool = False) -> Estimator:  # noqa: ARG002
        """Return the same estimator with what it left open chosen for a run."""
        return self

    def request(self, question: Question) -> Request:
        """Check a question, and open what answers it."""
        run, task, resources = question.run, question.task, question.resources
        trajectory, cost = Trajectory(run, task, self.layers), Cost()
        with cost.metered():
            if self.differentiates:
                trajectory = trajectory.compared()
            else:
                trajectory.check_examples()
        final = trajectory.scored(trajectory.final_whole())
        warn_of_other_weights(run, task.parameters(), final)
        single = question.queries == "each"
        query = Query(trajectory.task, final, question.query, single=single, resources=resources.inside())
        query.check()
        left_out = self._left_out(question)
        return Request(trajectory, left_out, query, resources, cost, question.displacements, repr(self))

    def _left_out(self, question: Question) -> LeftOut:
        return leave_out(question.task.size, question.ids, question.groups)

    def _exact(self, _values: Float[Tensor, "rows queries"]) -> Bool[Tensor, " rows"] | None:
        """Return which rows are exact replays; None: all of them are estimates."""
        return None

    @abstractmethod
    def _values(self, request: Request) -> tuple[Float[Tensor, "rows queries"], Params | None]:
        """Return the scores, and the displacements if they were asked for."""


def _moved(shards: list[dict[str, Tensor]]) -> Params:
    """Join all rows' displacements; those of a shard are let go of as they are joined, as they may be gigabytes."""
    names = [name for name in shards[0] if name.startswith("moved/")]
    return {name.removeprefix("moved/"): torch.cat([one.pop(name) for one in shards]) for name in names}


def titled(name: str, options: Mapping[str, object]) -> str:
    """Return a method's name with the options that are not the ordinary ones.

    >>> titled("ACC", {"transport": "free", "readout": "linear"}), titled("SGD-IE", {"readout": "exact"})
    ('ACC(free)', 'SGD-IE(exact readout)')
    """
    parts = []
    for option, value in options.items():
        if option == "readout":
            parts += [] if value == "linear" else [f"{value} readout"]
        elif option == "layers":
            parts += [] if value is None else [f"layers {value if isinstance(value, str) else ' '.join(value)}"]  # type: ignore[arg-type]
        elif value is not None:
            parts.append(str(value))
    return f"{name}({', '.join(parts)})" if parts else name
