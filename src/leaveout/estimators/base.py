"""What every estimator shares: the call, its checks, and the account of what it cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset

from leaveout.errors import InputError, MismatchError
from leaveout.members import Groups, Members, members_of
from leaveout.memory import kept_memory
from leaveout.readout import Projected, Query, Readout
from leaveout.resources import Cost, Resources
from leaveout.scores import Scores
from leaveout.store import Run
from leaveout.task import Task
from leaveout.trajectory import Trajectory
from leaveout.transport import Sweep
from leaveout.vectors import PARAM, Params, nbytes


@dataclass(frozen=True)
class Request:
    """One call of ``score``, checked."""

    trajectory: Trajectory
    members: Members
    query: Query
    resources: Resources
    cost: Cost
    displacements: bool

    def sweep(self, *, curved: bool, corrected: bool) -> Sweep:
        """A way through the run with these choices."""
        return Sweep(self.trajectory, self.resources, self.cost, curved, corrected)

    def scores(self, method: str, values: Float[Tensor, "rows queries"], moved: Params | None = None) -> Scores:
        """The values with everything that they need to be understood."""
        if not bool(torch.isfinite(values).all()):
            row = int((~torch.isfinite(values)).nonzero()[0, 0])
            raise MismatchError(
                f"The score of {self.members.names[row]!r} is not finite: the recurrence overflowed; train with a "
                "smaller learning rate, or score an earlier part of the run."
            )
        fingerprint = self.query.fingerprint()
        return Scores(
            values, self.members.names, self.query.ids, method, self.cost, moved, query_fingerprint=fingerprint
        )


class Estimator(ABC):
    """Scores every training example of a recorded run; subclasses say how."""

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
        groups: Groups | None = None,
        displacements: bool = False,
        resources: Resources | None = None,
    ) -> Scores:
        """How the query loss would change without each training example.

        Args:
            run: the recorded run.
            task: what was trained.
            query: the examples whose loss is explained, built like training examples.
            queries: ``"mean"`` for their mean loss, ``"each"`` for a column each.
            groups: leave these out together instead: lists of ids, or a dict of names to lists.
            displacements: keep each row's parameter displacement as ``scores.displacements``.
            resources: memory budget and progress.
        """
        request = self.request(run, task, query, queries, groups, displacements, resources)
        chosen = self.resolved(run, displacements=displacements)
        with request.cost.metered(), kept_memory():
            values, moved = chosen._values(request)
        return request.scores(chosen.name, values, moved)

    def resolved(self, _run: Run, *, displacements: bool = False) -> Estimator:  # noqa: ARG002 - for those that choose
        """The same estimator with what it left open chosen for a run."""
        return self

    def request(
        self,
        run: Run,
        task: Task,
        query: Dataset,
        queries: str,
        groups: Groups | None,
        displacements: bool,
        resources: Resources | None,
    ) -> Request:
        """What ``score`` was asked, checked."""
        if not isinstance(run, Run):
            raise InputError(f"A run is needed, not a {type(run).__name__}: open a directory with lo.open_run(path).")
        if queries not in ("mean", "each"):
            raise InputError(f"queries={queries!r} is unknown: use 'mean' or 'each'.")
        trajectory = Trajectory(run, task)
        return Request(
            trajectory,
            self._members(task, groups),
            Query(task, trajectory.final()[PARAM], query, single=queries == "each"),
            resources or Resources(),
            Cost(),
            displacements,
        )

    def _members(self, task: Task, groups: Groups | None) -> Members:
        return members_of(task.size, groups=groups)

    @abstractmethod
    def _values(self, request: Request) -> tuple[Float[Tensor, "rows queries"], Params | None]:
        """The scores, and the displacements if they were asked for."""


def swept(request: Request, readout: Readout, direction: str, sweep: Sweep) -> tuple[Tensor, Params | None]:
    """Scores by a sweep, forward or backward: the cheaper one unless one is asked for."""
    if direction not in ("auto", "forward", "backward"):
        raise InputError(f"direction={direction!r} is unknown: use 'auto', 'forward' or 'backward'.")
    if direction == "forward" or request.displacements or not isinstance(readout, Projected):
        if direction == "backward":
            raise InputError("Displacements and the exact readout go forward: leave direction at 'auto'.")
        return _forward(request, readout, sweep)
    vectors = readout.vectors(request.query)
    # Backward takes a vector a query, forward one a row; the corrected step has one a row either way.
    if direction == "auto" and (sweep.corrected or len(next(iter(vectors.values()))) > len(request.members)):
        return _forward(request, readout, sweep)
    return readout.of_products(request.query, sweep.inner_products(request.members, vectors)), None


def _forward(request: Request, readout: Readout, sweep: Sweep) -> tuple[Tensor, Params | None]:
    bytes_each = 6 * nbytes(request.trajectory.initial())
    values, kept = [], []
    for part in request.members.chunks(request.resources.chunk(bytes_each, len(request.members))):
        moved = sweep.displacements(part)[PARAM]
        values.append(readout.of_displacements(request.query, moved))
        if request.displacements:
            kept.append(moved)
    return torch.cat(values), joined(kept)


def joined(parts: list[Params]) -> Params | None:
    """Stacks one after the other; None where nothing was kept."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else None
