"""The states at the ends of epochs, for the estimators that use only these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from leaveout._util.trees import PARAM, Params, State
from leaveout.estimators.query import Query
from leaveout.estimators.readout import Linear
from leaveout.estimators.request import Request
from leaveout.optim import IDLE, STILL, Hyper
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
    vector_bytes = budget.backward_bytes(trajectory)
    budget.check(request.resources, trajectory, vector_bytes, "one query vector")
    size = request.resources.part(2 * vector_bytes, len(request.query.ids))
    rates: list[list[float]] = []
    shares: list[list[float]] = []
    hypers: list[Hyper] = []
    last: int | None = None

    def ended(params: Params, state: State) -> Checkpoint:
        def mean(rows: list[list[float]]) -> dict[str, float]:
            values = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
            return {name: values[group] for name, group in trajectory.rule.groups.items()}

        original = request.query
        query = Query(original.task, params, original.dataset, single=original.single, resources=original.resources)
        groups = trajectory.rule.groups.items()
        adam = {key: {name: hypers[group][key] for name, group in groups} for key in ADAM if key in hypers[0]}
        return Checkpoint(params, state, query, size, mean(rates), mean(shares), adam)

    for recorded in request.resources.track(trajectory.forward(), len(trajectory), "checkpoints"):
        if last is not None and recorded.record.epoch != last:
            yield ended(recorded.params, recorded.before)
            rates, shares = [], []
        now = recorded.record.hypers
        last, hypers = (
            recorded.record.epoch,
            [before if hyper.get(STILL) else hyper for hyper, before in zip(now, hypers or now, strict=True)],
        )
        rates.append([0.0 if hyper.get(STILL) or hyper.get(IDLE) else hyper["lr"] for hyper in now])
        shares.append([rate / len(recorded.record.ids) for rate in rates[-1]])
    yield ended(trajectory.final_whole()[PARAM], trajectory.final())


def example_blocks(request: Request) -> Iterator[tuple[Int[Tensor, " block"], Batch]]:
    """Yield all examples that some row leaves out, in batches of the run's batch size."""
    task, size = request.trajectory.task, len(request.trajectory.run.record(0).ids)
    everyone = request.left_out.examples.unique()
    for ids in everyone.split(size):
        yield ids, task.read(ids.tolist())
