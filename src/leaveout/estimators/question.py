"""What an estimator is asked, as one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.utils.data import Dataset

from leaveout.compute.resources import Resources
from leaveout.errors import InputError, is_whole, kind_of
from leaveout.run.reader import Run
from leaveout.task.task import Task
from leaveout.trajectory.left_out import Groups


@dataclass(frozen=True)
class Question:
    """A run and its task, the queries whose loss is explained, the left-out examples, and the resources to use.

    Args:
        run: the recorded run.
        task: what was trained.
        query: the examples whose loss is explained, built like training examples.
        queries: ``"mean"`` for their mean loss, ``"each"`` for one column per query.
        ids: the examples to score; all of them by default.
        groups: leave these out together instead: lists of ids, or a dict of names to lists.
        displacements: keep each row's parameter displacement.
        resources: memory budget and progress.
        at: score the model after this many steps, by default at the run's end; ``run`` then becomes its head.
    """

    run: Run
    task: Task
    query: Dataset
    queries: str = "mean"
    ids: Sequence[int] | None = None
    groups: Groups | None = None
    displacements: bool = False
    resources: Resources = field(default_factory=Resources)
    at: int | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.run, Run):
            raise InputError(
                f"A run is needed, not {kind_of(self.run)}: open a directory with lo.open_run(path).",
                code="run-expected",
            )
        if self.queries not in ("mean", "each"):
            raise InputError(f"queries={self.queries!r} is unknown: use 'mean' or 'each'.", code="queries-unknown")
        if self.at is not None:
            if self.at == "average":
                object.__setattr__(self, "run", self.run.average())
                return
            if not is_whole(self.at, 1, len(self.run)):
                raise InputError(
                    f"at={self.at!r} is not a state of a run of {len(self.run)} steps: give the number of steps that "
                    "lead to it, from 1 on, or 'average'.",
                    code="at-out-of-range",
                )
            object.__setattr__(self, "run", self.run.head(int(self.at)))
