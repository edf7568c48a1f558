"""What every estimator shares: the call, its checks, and the account of what it cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset

from leaveout.errors import InputError, MismatchError
from leaveout.members import Groups, Members, members_of
from leaveout.memory import kept_memory
from leaveout.readout import Projected, Query, Readout
from leaveout.resources import VECTORS, Cost, Resources
from leaveout.scores import Scores
from leaveout.shards import Shard, completed, run_identity, task_identity
from leaveout.store import Run
from leaveout.task import Task
from leaveout.trajectory import Trajectory
from leaveout.transport import Sweep
from leaveout.vectors import PARAM, Params, height, nbytes, split

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One call of ``score``, checked."""

    trajectory: Trajectory
    members: Members
    query: Query
    resources: Resources
    cost: Cost
    displacements: bool
    method: str

    def shards(
        self, function: Callable[[Request, T], dict[str, Tensor]], items: Sequence[T], words: Sequence[str], what: str
    ) -> list[dict[str, Tensor]]:
        """``function(request, item)`` for every item, wherever the engine does it; ``words`` tell the items apart."""
        keys = [f"{self._identity} {what} {word}" for word in words] if self.resources.work is not None else []
        inside = replace(self, resources=self.resources.inside())
        work = _alone if self.resources.elsewhere else _here
        done = completed(self.resources, partial(work, inside, function), items, keys, what)
        for shard in done:
            self.cost.hvps += shard.cost.hvps
            self.cost.gradients += shard.cost.gradients
            self.cost.peak_memory = max(self.cost.peak_memory, shard.cost.peak_memory)
        return [shard.tensors for shard in done]

    @cached_property
    def _identity(self) -> str:
        """Everything that the scores depend on, but for the rows."""
        task = task_identity(self.query.task, self.query.params)
        asked = (self.query.fingerprint(), self.query.single, self.displacements)
        return f"{version('leaveout')} {run_identity(self.trajectory.run)} {task} {self.method} {asked}"

    def rows(
        self, function: Callable[[Request], tuple[Tensor, Params | None]], bytes_each: int, what: str
    ) -> tuple[Tensor, Params | None]:
        """Scores and displacements of all rows, by shards of them; ``function`` has those of a request's rows."""
        parts = list(self.members.chunks(self.resources.shard_size(bytes_each, len(self.members))))
        words = [f"{part.examples.tolist()} {part.lengths.tolist()}" for part in parts]
        done = self.shards(partial(_rows, function), parts, words, what)
        moved = [{n.removeprefix("moved/"): t for n, t in one.items() if "/" in n} for one in done]
        return torch.cat([one["values"] for one in done]), joined(moved) if self.displacements else None

    def columns(self, function: Callable[[Request, Params], dict[str, Tensor]], vectors: Params) -> dict[str, Tensor]:
        """What ``function`` gives for query vectors, a column each, by shards of them."""
        size = self.resources.shard_size(1, height(vectors), VECTORS)
        parts = list(split(vectors, size))
        words = [f"vectors {number} of {size}" for number in range(len(parts))]
        done = self.shards(function, parts, words, "sweeping")
        return {name: torch.cat([one[name] for one in done], dim=1) for name in done[0]}

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
        chosen = self.resolved(run, displacements=displacements)
        request = chosen.request(run, task, query, queries, groups, displacements, resources)
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
            repr(self),
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
    if direction == "auto" and (sweep.corrected or height(vectors) > len(request.members)):
        return _forward(request, readout, sweep)
    products = request.columns(partial(_pulled, sweep), vectors)["products"]
    return readout.of_products(request.query, products), None


def _forward(request: Request, readout: Readout, sweep: Sweep) -> tuple[Tensor, Params | None]:
    bytes_each = 6 * nbytes(request.trajectory.initial())
    return request.rows(partial(_pushed, readout, sweep), bytes_each, "forward")


def _pushed(readout: Readout, sweep: Sweep, request: Request) -> tuple[Tensor, Params | None]:
    moved = replace(sweep, resources=request.resources, cost=request.cost).displacements(request.members)[PARAM]
    return readout.of_displacements(request.query, moved), moved if request.displacements else None


def _pulled(sweep: Sweep, request: Request, vectors: Params) -> dict[str, Tensor]:
    sweep = replace(sweep, resources=request.resources, cost=request.cost)
    return {"products": sweep.inner_products(request.members, vectors)}


def _here(request: Request, function: Callable[[Request, T], dict[str, Tensor]], item: T) -> Shard:
    own = replace(request, cost=Cost())
    return Shard(function(own, item), own.cost)


def _alone(request: Request, function: Callable[[Request, T], dict[str, Tensor]], item: T) -> Shard:
    """In a process of its own, which is not accounted for here."""
    own = replace(request, cost=Cost())
    with own.cost.metered(), kept_memory():
        return Shard(function(own, item), own.cost)


def _rows(
    function: Callable[[Request], tuple[Tensor, Params | None]], request: Request, part: Members
) -> dict[str, Tensor]:
    values, moved = function(replace(request, members=part))
    return {"values": values, **{f"moved/{name}": tensor for name, tensor in (moved or {}).items()}}


def joined(parts: list[Params]) -> Params:
    """Stacks one after the other."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
