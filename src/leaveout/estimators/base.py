"""What all estimators share: the call, its checks, and the record of its cost."""

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
from leaveout.estimators.query import Query
from leaveout.estimators.question import Question
from leaveout.estimators.readout import Collected, Projected
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

        def work(given: tuple[T, Path | None]) -> Shard:
            item, checkpoint = given
            own = replace(inside, cost=Cost(), resources=inside.resources.with_checkpoint(checkpoint))
            with ExitStack() as metered:
                if elsewhere:  # another process, whose cost is not counted elsewhere
                    metered.enter_context(own.cost.metered())
                    metered.enter_context(kept_memory())
                tensors = function(own, item)
            if own.resources.memory != "auto":  # a fragmented heap grows from shard to shard
                returned()
            return Shard(tensors, own.cost)

        for shard in completed(self.resources, work, items, keys, what):
            self.cost.hvps += shard.cost.hvps
            self.cost.gradients += shard.cost.gradients
            self.cost.peak_memory = max(self.cost.peak_memory, shard.cost.peak_memory)
            yield shard.tensors

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
        function: Callable[[Request, Params], dict[str, Tensor]],
        readout: Projected,
        *,
        alone: bool = False,
        vector_bytes: int | None = None,
    ) -> dict[str, Tensor]:
        """Read scores from the inner products with a readout's vectors that ``function`` returns, by shards of vectors.

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
        """Return the values with everything that is needed to interpret them."""
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

    readout: str | None = None
    """How displacements become changes of the loss; None for methods that have no choice."""

    differentiates: ClassVar[bool] = True
    """Whether it takes derivatives other than training's own; these are first compared at the run's last state."""

    def __post_init__(self) -> None:
        """Turn lists into tuples, so that estimators can be compared and used as dictionary keys."""
        for option, value in list(vars(self).items()):
            if isinstance(value, list | np.ndarray | Tensor):
                entries = value if isinstance(value, list) else value.tolist()
                object.__setattr__(self, option, tuple(entries) if isinstance(entries, list) else entries)

    @property
    def unit(self) -> str:
        """The unit of the scores."""
        return UNIT

    @property
    @abstractmethod
    def name(self) -> str:
        """The method's name, as stored in the scores."""

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
            queries: ``"mean"`` for their mean loss, ``"each"`` for one column per query.
            ids: the examples to score; all of them by default.
            groups: leave these out together instead: lists of ids, or a dict of names to lists.
            displacements: keep each row's parameter displacement as ``scores.displacements``.
            resources: memory budget and progress.
            at: score the model after this many steps (the best checkpoint, say) instead of the last one: the scores are
                those of ``run.head(at)``, which ``verify`` and the like then need.
        """
        resources = resources or Resources()
        return self.answer(Question(run, task, query, queries, ids, groups, displacements, resources, at))

    def answer(self, question: Question) -> Scores:
        """Estimate what ``score`` does, given the question as one object."""
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
        """Estimate how each training example's loss would change without it: high for memorised examples.

        This is the diagonal of the scores with the training set as queries, computed in blocks. It costs as much as
        one query per example; TracIn with checkpoints takes two gradients per example at each of them.

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
        """Estimate each row's effect on the query with the same index."""
        return self._values(request)[0].diagonal()

    def resolved(self, _run: Run, _task: Task | None = None, *, displacements: bool = False) -> Estimator:  # noqa: ARG002
        """Return the same estimator with its open options chosen for a run."""
        return self

    def request(self, question: Question) -> Request:
        """Check a question, and prepare what is needed to answer it."""
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
        query.check(gradient=self.readout == "linear")
        left_out = self._left_out(question)
        return Request(trajectory, left_out, query, resources, cost, question.displacements, repr(self))

    def _left_out(self, question: Question) -> LeftOut:
        return leave_out(question.task.size, question.ids, question.groups)

    def _exact(self, _values: Float[Tensor, "rows queries"]) -> Bool[Tensor, " rows"] | None:
        """Return which rows are exact replays; None if all are estimates."""
        return None

    @abstractmethod
    def _values(self, request: Request) -> tuple[Float[Tensor, "rows queries"], Params | None]:
        """Return the scores, and the displacements if requested."""


def _moved(shards: list[dict[str, Tensor]]) -> Params:
    """Join all rows' displacements; each shard's are freed as they are joined, since they may be gigabytes."""
    names = [name for name in shards[0] if name.startswith("moved/")]
    return {name.removeprefix("moved/"): torch.cat([one.pop(name) for one in shards]) for name in names}


def titled(name: str, options: Mapping[str, object]) -> str:
    """Return a method's name with its options that differ from the default.

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
