"""What every method would need, in time, memory and disk, told from a few measured steps."""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from torch import nn
from torch.utils.data import Dataset

from leaveout._util.trees import nbytes
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError
from leaveout.estimators import ACC, SGDIE, DVEmb, Estimator, Replay, TracIn
from leaveout.run.reader import Run
from leaveout.run.train import train
from leaveout.sweep.transports import Subspace
from leaveout.task.task import Task
from leaveout.trajectory.trajectory import Trajectory

FEW, MORE = 16, 64
"""Steps that are measured: the first few pay for what is done once, the others tell what a step costs."""

FEWEST, ROWS = 8, 512
"""Rows that are measured where every example has a vector or a model of its own; eightfold, while that is cheap."""

LIMIT = 2.0
"""Seconds that a measurement may take that is made once more, or with more rows."""


@dataclass(frozen=True)
class Plan:
    """One method's needs: ``seconds`` of scoring, ``memory`` at its peak, ``disk`` beside the run, in bytes."""

    method: str
    seconds: float
    memory: int
    disk: int


def plan(
    task: Task,
    query: Dataset,
    run: Run | None = None,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    epochs: int = 1,
    batch_size: int = 64,
    resources: Resources | None = None,
) -> pd.DataFrame:
    """Predict seconds, memory and disk of training (for a run that is not there yet) and of every method along it.

    ``AdamIE`` and ``InfluenceFunction`` do not go along a run: one takes every example's gradient once per epoch, the
    other as many products over all data as conjugate gradients need.

    Args:
        task: what is trained.
        query: the examples whose mean loss would be explained.
        run: a recorded run; without one, ``optimizer``, ``epochs`` and ``batch_size`` describe one.
        optimizer: makes the optimizer for a model, as in ``lambda m: torch.optim.SGD(m.parameters(), lr=0.1)``.
        epochs: of the planned run.
        batch_size: of the planned run.
        resources: the memory budget that scoring would have.
    """
    shown = resources or Resources()
    budget = Resources(shown.memory, progress=False)  # a bar for every few steps would only flicker
    if run is not None:
        return _table(task, query, run, len(run), budget, shown, [])
    if optimizer is None:
        raise InputError(
            "There is nothing to plan: give a run, or an optimizer, epochs and batch_size.", code="nothing-to-plan"
        )
    steps = epochs * -(-task.size // batch_size)
    trial = copy.deepcopy(task)
    with tempfile.TemporaryDirectory() as folder:
        instance = optimizer(trial.model)
        few = min(epochs, -(-MORE * batch_size // task.size))
        cost = Cost()
        with cost.metered():
            short = train(trial, instance, few, batch_size, 0, Path(folder) / "run", resources=budget)
        disk = nbytes(short.state(0)) * (steps + 1)
        training = Plan("training, recorded", cost.seconds / len(short) * steps, cost.peak_memory, disk)
        return _table(trial, query, short, steps, budget, shown, [training])


def _table(
    task: Task, query: Dataset, run: Run, steps: int, budget: Resources, shown: Resources, plans: list[Plan]
) -> pd.DataFrame:
    cheap: list[Estimator] = [TracIn(), SGDIE(), DVEmb()]
    if run.rule.linear:
        cheap += [ACC(), ACC(Subspace(8))]
    jobs = [partial(_measured, estimator) for estimator in cheap] + [partial(_by_rows, k) for k in ("exact", "replay")]
    plans += [job(task, query, run, steps, budget) for job in shown.track(jobs, len(jobs), "measuring")]
    frame = pd.DataFrame([plan.__dict__ for plan in plans]).set_index("method")
    return frame.astype({"memory": "int64", "disk": "int64"})


def _measured(estimator: Estimator, task: Task, query: Dataset, run: Run, steps: int, resources: Resources) -> Plan:
    seconds, memory = _extrapolated(
        lambda own, part: estimator.score(part, own, query, resources=resources).cost, task, run, steps
    )
    if not isinstance(estimator, ACC):
        return Plan(estimator.name, seconds, memory, 0)
    estimator = estimator.resolved(run, task)
    # The rows that a full run touches and the first steps do not.
    rows = task.size * nbytes(Trajectory(run, task).initial())
    fits = rows <= resources.bytes
    return Plan(estimator.name, seconds, memory + rows if fits else memory, 0 if fits else rows)


def _by_rows(kind: str, task: Task, query: Dataset, run: Run, steps: int, resources: Resources) -> Plan:
    """Predict the methods whose cost grows with the rows: measured on two numbers of them, and scaled to all."""
    totals, memories = [], []

    def scored(count: int, own: Task, part: Run) -> Cost:
        estimator: Estimator = Replay() if kind == "replay" else ACC("exact")
        groups = [[i] for i in range(count)]
        return estimator.score(part, own, query, groups=groups, resources=resources).cost

    trial = task.untraced()
    counts = _counts(task, lambda count: scored(count, trial, run.head(FEW)).seconds)
    for count in counts:
        seconds, memory = _extrapolated(partial(scored, count), task, run, steps)
        totals.append(seconds)
        memories.append(memory)
    name = "Replay" if kind == "replay" else "ACC(exact)"
    if len(counts) == 1:
        return Plan(name, totals[0], memories[0], 0)
    span, more = counts[1] - counts[0], task.size - counts[1]
    seconds = totals[1] + max(0.0, totals[1] - totals[0]) / span * more
    memory = memories[1] + min(max(0, memories[1] - memories[0]) // span * more, resources.bytes)
    return Plan(name, seconds, memory, 0)


def _counts(task: Task, measure: Callable[[int], float]) -> tuple[int, ...]:
    """Choose how many rows to measure: all if they are few, otherwise two numbers, small ones where a row is dear."""
    most = FEWEST
    while most < min(ROWS, task.size):
        measure(most)  # traces
        if measure(most) * FEWEST > LIMIT:
            break
        most *= FEWEST
    return (task.size,) if task.size <= most else (most // 4, most)


def _extrapolated(scored: Callable[[Task, Run], Cost], task: Task, run: Run, steps: int) -> tuple[float, int]:
    """Extrapolate seconds and memory to all steps: a first run pays for what is done once, others tell the rate."""
    few, more = run.head(FEW), run.head(MORE)
    cold, task = _first(scored, task.untraced(), more)
    if cold.seconds < LIMIT:  # making traces takes now longer, now less long
        cold, task = min((cold, task), _first(scored, task.untraced(), more), key=lambda pair: pair[0].seconds)
    if len(more) == len(few):
        return cold.seconds / len(more) * steps, cold.peak_memory
    short, long = (min(scored(task, part).seconds for _ in range(2)) for part in (few, more))
    rate = max(0.0, (long - short) / (len(more) - len(few)))
    once = max(0.0, cold.seconds - len(more) * rate)
    return once + rate * steps, cold.peak_memory


def _first(scored: Callable[[Task, Run], Cost], task: Task, run: Run) -> tuple[Cost, Task]:
    """Return what a run costs on a task of which nothing is traced, and the task, of which it is then."""
    gc.collect()  # in the midst of it, a sweep would be taken for work
    return scored(task, run), task
