"""What a report is about: a run, its scores, and as much of task and data as is at hand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.utils.data import Dataset

from leaveout import batches
from leaveout.errors import InputError
from leaveout.report.opinions import Opinions, opinions
from leaveout.report.show import Show
from leaveout.resources import Resources
from leaveout.scores import Scores
from leaveout.store import Run
from leaveout.task import Task
from leaveout.vectors import PARAM


@dataclass(frozen=True)
class Topic:
    """What a report is about; without a task it knows ids and scores alone."""

    run: Run
    scores: Scores
    task: Task | None
    query: Dataset | None
    show: Show
    resources: Resources

    def __post_init__(self) -> None:
        if self.query is not None and self.task is None:
            raise InputError("A query set was given without its task: give task= as well, which knows how to read it.")
        if self.queries is not None and self.single and self.queries != len(self.scores.query_ids):
            raise InputError(
                f"The scores have {len(self.scores.query_ids)} queries and the query set {self.queries}: give the "
                "query set that was scored."
            )

    @property
    def groups(self) -> bool:
        """Whether rows are groups of examples."""
        return any(isinstance(i, str) for i in self.scores.train_ids)

    @property
    def single(self) -> bool:
        """Whether there is a column for each query."""
        return self.scores.query_ids != ("mean",)

    @property
    def queries(self) -> int | None:
        """How many queries there are."""
        return None if self.query is None else batches.size(self.query)

    @cached_property
    def mean(self) -> Tensor:
        """The scores for the mean query loss."""
        return self.scores.mean().detach().double().cpu()

    @cached_property
    def own(self) -> Opinions | None:
        """What the final model says of the scored examples."""
        if self.task is None or self.groups:
            return None
        return self._opinions(self.task, self.task.train_set, [int(i) for i in self.scores.train_ids])

    @cached_property
    def asked(self) -> Opinions | None:
        """What the final model says of the queries."""
        if self.task is None or self.query is None:
            return None
        return self._opinions(self.task, self.query, range(batches.size(self.query)))

    def _opinions(self, task: Task, dataset: Dataset, ids: range | list[int]) -> Opinions:
        params = {name: tensor.to(task.device) for name, tensor in self.run.final()[PARAM].items()}
        return opinions(task, params, dataset, ids, self.show.classes, self.resources)
