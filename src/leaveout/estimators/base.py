"""What all estimators share: the call and its checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.data import Dataset, Subset

from leaveout._util.trees import Params
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.estimators.choice import Choice
from leaveout.estimators.query import Query
from leaveout.estimators.question import Question
from leaveout.estimators.request import Request, check_finite
from leaveout.run.model_match import warn_of_other_weights
from leaveout.run.reader import Run
from leaveout.scores import OWN_SIGN, SELF, UNIT, Scores
from leaveout.sweep import budget
from leaveout.task.measures import unit_of
from leaveout.task.task import Task
from leaveout.trajectory.left_out import Groups, LeftOut, leave_out
from leaveout.trajectory.trajectory import Trajectory


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
        with request.cost.metered(request.trajectory.task.device):
            values, moved = chosen.values(request)
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
        resources, chosen = (resources or Resources()).on(task.device), self.resolved(run, task)
        everyone = leave_out(task.size, ids)
        bytes_each = 2 * budget.backward_bytes(Trajectory(run, task, self.layers))
        values, cost = [], Cost()
        for part in everyone.chunks(resources.part(bytes_each, len(everyone))):
            own = Subset(task.train_set, part.examples.tolist())
            request = replace(chosen.request(Question(run, task, own, "each", resources=resources)), left_out=part)
            with request.cost.metered(request.trajectory.task.device):
                values.append(chosen._diagonal(request))
            cost = cost + request.cost
        whole = torch.cat(values)[:, None]
        check_finite(whole, everyone)
        return Scores(
            whole,
            everyone.names,
            (SELF,),
            chosen.name,
            cost,
            exact=chosen._exact(whole),
            sign=OWN_SIGN,
            unit=unit_of(task.measure) or UNIT if self.unit == UNIT else self.unit,
            precision=run.precision,
            held=run.held,
            run_fingerprint=run.fingerprint,
        )

    def _diagonal(self, request: Request) -> Float[Tensor, " rows"]:
        """Estimate each row's effect on the query with the same index."""
        return self.values(request)[0].diagonal()

    def resolved(self, _run: Run, _task: Task | None = None, *, displacements: bool = False) -> Estimator:  # noqa: ARG002
        """Return the same estimator with its open options chosen for a run."""
        return self

    def request(self, question: Question) -> Request:
        """Check a question, and prepare what is needed to answer it."""
        run, task = question.run, question.task
        resources = question.resources.on(task.device)
        trajectory, cost = Trajectory(run, task, self.layers), Cost()
        with cost.metered(task.device):
            if self.differentiates:
                trajectory = trajectory.compared(question.query)
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

    def choice(self) -> Choice:
        """Return what it computes, for an estimator that is a point in the space of choices."""
        raise TypeError(f"{type(self).__name__} needs either choice() or values(request)")

    def values(self, request: Request) -> tuple[Float[Tensor, "rows queries"], Params | None]:
        """Return the scores, and the displacements if requested."""
        return self.choice().values(request)


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
