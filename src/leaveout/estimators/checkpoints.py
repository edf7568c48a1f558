"""The states at the ends of epochs, for the estimators that use only these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from leaveout._util.trees import PARAM, Params, State
from leaveout.estimators.query import Query
from leaveout.estimators.readout import Linear
from leaveout.estimators.request import Request
from leaveout.optim import IDLE, STILL, Hyper
from leaveout.run.record import Record
from leaveout.sweep import budget
from leaveout.task.batches import Batch

ADAM = ("beta1", "beta2", "eps", "step")


@dataclass(frozen=True)
class Checkpoint:
    """The end of an epoch: all parameters, the state of the chosen ones, and a summary of the epoch's steps.

    ``rate`` is the epoch's mean learning rate of each parameter, ``share`` the mean of α/|Z|, an example's part of it;
    ``adam`` has the hyperparameters of Adam's last step.
    """

    params: Params
    state: State
    query: Query
    size: int
    rate: dict[str, float]
    share: dict[str, float]
    adam: dict[str, dict[str, float]]

    def vectors(self) -> Iterator[tuple[int, Params]]:
        """Yield the query gradients at this state in stacks of at most ``size``, each with the index of its first."""
        for start in range(0, len(self.query.ids), self.size):
            yield start, Linear().part(self.query, start, min(start + self.size, len(self.query.ids)))


def checkpoints(request: Request) -> Iterator[Checkpoint]:
    """Yield the ends of all epochs; a run whose loop did not mark epochs has one."""
    trajectory = request.trajectory
    trajectory.check_steps()
    vector_bytes = budget.backward_bytes(trajectory)
    budget.check(request.resources, trajectory, vector_bytes, "one query vector")
    size = request.resources.part(2 * vector_bytes, len(request.query.ids))
    number, epoch = trajectory.run.record(0).epoch, _Epoch()
    for recorded in request.resources.track(trajectory.forward(), len(trajectory), "checkpoints"):
        if recorded.record.epoch != number:
            yield _checkpoint(request, epoch, recorded.params, recorded.before, size)
            number, epoch = recorded.record.epoch, _Epoch(epoch.hypers)
        epoch.add(recorded.record)
    yield _checkpoint(request, epoch, trajectory.final_whole()[PARAM], trajectory.final(), size)


class _Epoch:
    """The steps of an epoch so far: each group's learning rate and α/|Z| at each, and its last hyperparameters."""

    def __init__(self, hypers: Sequence[Hyper] = ()) -> None:
        self.hypers = list(hypers)
        self.rates: list[list[float]] = []
        self.shares: list[list[float]] = []

    def add(self, record: Record) -> None:
        """Add a step; a group that it skipped keeps its last hyperparameters."""
        pairs = zip(record.hypers, self.hypers or record.hypers, strict=True)
        self.hypers = [before if now.get(STILL) else now for now, before in pairs]
        self.rates.append([0.0 if now.get(STILL) or now.get(IDLE) else now["lr"] for now in record.hypers])
        self.shares.append([rate / len(record.ids) for rate in self.rates[-1]])


def _checkpoint(request: Request, epoch: _Epoch, params: Params, state: State, size: int) -> Checkpoint:
    groups, original = request.trajectory.rule.groups, request.query

    def mean(rows: list[list[float]]) -> dict[str, float]:
        values = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
        return {name: values[group] for name, group in groups.items()}

    query = Query(original.task, params, original.dataset, single=original.single, resources=original.resources)
    names = [key for key in ADAM if key in epoch.hypers[0]]
    adam = {key: {name: epoch.hypers[group][key] for name, group in groups.items()} for key in names}
    return Checkpoint(params, state, query, size, mean(epoch.rates), mean(epoch.shares), adam)


def example_blocks(request: Request) -> Iterator[tuple[Int[Tensor, " block"], Batch]]:
    """Yield all examples that some row leaves out, in batches of the run's batch size."""
    task, size = request.trajectory.task, len(request.trajectory.run.record(0).ids)
    everyone = request.left_out.examples.unique()
    for ids in everyone.split(size):
        yield ids, task.read(ids.tolist())
