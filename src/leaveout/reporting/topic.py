"""What a report is about: a run, the answers about it, and as much of task and data as is available."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor
from torch.utils.data import Dataset

from leaveout.errors import InputError
from leaveout.estimators.timeline import Timeline
from leaveout.evaluate.check import Check
from leaveout.evaluate.label_issues import Labels
from leaveout.evaluate.opinions import Opinions
from leaveout.evaluate.refine import with_truths
from leaveout.reporting.show import Show
from leaveout.run.reader import Run
from leaveout.scores import SELF, UNIT, Scores
from leaveout.task import batches
from leaveout.task.task import Task
from leaveout.trajectory.left_out import Groups, leave_out


@dataclass(frozen=True)
class Topic:
    """What a report is about; without a task it has only ids and scores.

    ``scores`` are those of the method that is shown first, ``others`` of the same rows by other methods, ``by_query``
    of the same rows with a column per query, by any method; ``checks`` are by method. ``when`` says when influence
    arose, ``own`` and ``asked`` what the final model predicts for the scored examples and for the queries; ``notes``
    what could not be had.
    """

    run: Run
    scores: Scores
    task: Task | None
    query: Dataset | None
    show: Show
    others: tuple[Scores, ...] = ()
    checks: Mapping[str, Check] = field(default_factory=dict)
    by_query: Scores | None = None
    labels: Labels | None = None
    when: Timeline | None = None
    own: Opinions | None = None
    asked: Opinions | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for other in (*self.others, *([self.by_query] if self.by_query else [])):
            if other.train_ids != self.scores.train_ids or (other.queries == SELF) != (self.scores.queries == SELF):
                raise InputError(
                    f"{other.method} scored other rows than {self.scores.method}: give scores of the same examples or "
                    "groups.",
                    code="scores-of-other-rows",
                )
        if self.by_query is not None and self.queries not in (None, len(self.by_query.query_ids)):
            raise InputError(
                f"The scores have {len(self.by_query.query_ids)} queries and the query set {self.queries}: give the "
                "query set that was scored.",
                code="query-count-differs",
            )
        if self.when is not None:
            self.when.check_same_queries(self.scores)

    @property
    def groups(self) -> bool:
        """Say whether rows are groups of examples."""
        return any(isinstance(i, str) for i in self.scores.train_ids)

    @cached_property
    def members(self) -> dict[str, list[int]] | None:
        """The examples of each scored group, if they are known."""
        if not self.groups or self.scores.groups is not None or self.show.groups is None or self.task is None:
            return self.scores.groups
        groups = membership(self.task.size, self.show.groups)
        if missing := [name for name in self.scores.train_ids if name not in groups]:
            raise InputError(
                f"Group {missing[0]!r} was scored and is not in Show(groups=...): give the same groups.",
                code="group-not-shown",
            )
        return {str(name): groups[str(name)] for name in self.scores.train_ids}

    @property
    def loss(self) -> bool:
        """Say whether scores are changes of the query loss, and not merely a ranking."""
        return self.scores.unit == UNIT

    @property
    def queries(self) -> int | None:
        """The number of queries."""
        return None if self.query is None else batches.size(self.query)

    @cached_property
    def mean(self) -> Tensor:
        """The first method's scores for the mean query loss, exact where they were replayed."""
        return self.column(self.scores)[0]

    @property
    def methods(self) -> tuple[Scores, ...]:
        """The scores of all methods, with those that are shown first in front."""
        return (self.scores, *self.others)

    @cached_property
    def truths(self) -> dict[int | str, float]:
        """The exact changes of the mean query loss, for every row that was replayed for any method."""
        values: dict[int | str, float] = {}
        for scores in self.methods:
            if scores.exact is not None and scores.is_effect:
                exact = zip(scores.train_ids, scores.mean().tolist(), scores.exact.tolist(), strict=True)
                values |= {name: value for name, value, sure in exact if sure}
            if scores.method in self.checks:
                values |= self.checks[scores.method].truths
        return values

    def column(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return a method's scores with replayed values in place of estimates, and which rows are exact."""
        known = with_truths(scores, self.truths)
        assert known.exact is not None  # noqa: S101 - with_truths says it
        return known.values[:, 0], known.exact

    @cached_property
    def failed(self) -> str:
        """Why the training taught the model nothing, in words; empty if it did."""
        whole = self.own is not None and self.task is not None and len(self.own.losses) == self.task.size
        return self.own.weakness if whole and self.own is not None and self.own.failed else ""


def membership(size: int, groups: Groups) -> dict[str, list[int]]:
    """Return the examples of each group, checked."""
    left_out = leave_out(size, groups=groups)
    parts = left_out.examples.split(left_out.lengths.tolist())
    return {str(name): part.tolist() for name, part in zip(left_out.names, parts, strict=True)}
