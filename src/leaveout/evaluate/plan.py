"""What every method would need, in time, memory and disk, told from a few measured steps."""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import pandas as pd
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from leaveout._util.trees import PARAM, Params, nbytes
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, UnsupportedError
from leaveout.estimators import ACC, SGDIE, DVEmb, Estimator, Replay, TracIn
from leaveout.estimators.readout import Linear, Query
from leaveout.run import following
from leaveout.run.reader import Run
from leaveout.run.train import train
from leaveout.sweep.transports import Subspace
from leaveout.task import batches
from leaveout.task.task import Task
from leaveout.trajectory.trajectory import Trajectory

FIRST, STEPS = 2, 8
"""Steps that are measured: the first pay for what is done once, the others tell what a step costs."""

SHARE = 0.25
"""Seconds after which a measurement is long enough: one method has a few of them."""

QUICK = 0.01
"""Seconds per step below which it matters that a step is repeated from a trace."""

QUERIES = 32
"""Queries that are measured; the others cost as much each."""

FEWEST, TIMES = 4, 4
"""Rows that are measured first where every row has a model or vector of its own, and how many times more next."""


@dataclass(frozen=True)
class Plan:
    """One method's needs: ``seconds`` of scoring, ``memory`` at its peak, ``disk`` beside the run, in bytes."""

    method: str
    seconds: float
    memory: int
    disk: int


@dataclass(frozen=True)
class _Subject:
    """What is measured: a part of the run with a few queries, and the size of the whole."""

    task: Task
    run: Run
    query: Dataset
    queries: int
    rows: int
    steps: int
    epochs: int
    resources: Resources

    @property
    def ratio(self) -> float:
        """How many times more queries there are than are measured."""
        return self.queries / batches.size(self.query)

    @cached_property
    def query_seconds(self) -> float:
        """What looking at the queries that are not measured takes: their losses and their gradient, once."""
        query = _queries(self)

        def look() -> None:
            query.check()
            Linear().part(query, 0, 1)

        return _timed(look) * max(0.0, self.ratio - 1)


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
    """Predicted seconds, memory and disk of training (for a run that is not there yet) and of every method along it.

    A few steps are measured with a few queries and rows, which takes seconds, and scaled to the whole: expect the
    right order of magnitude, not the right second. ``AdamIE`` and ``InfluenceFunction`` do not go along a run: one
    takes every example's gradient once an epoch, the other as many products over all data as conjugate gradients need.
    Methods that refuse the run are left out.

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
        return _table(_subject(task, query, run, _length(run), task.size, budget), shown, [])
    if optimizer is None:
        raise InputError(
            "There is nothing to plan: give a run, or an optimizer, epochs and batch_size.", code="nothing-to-plan"
        )
    steps = epochs * -(-task.size // batch_size)
    trial = copy.deepcopy(task)
    trial.train_set = Subset(trial.train_set, range(min(task.size, FIRST * STEPS * batch_size)))
    with tempfile.TemporaryDirectory() as folder:
        made = optimizer(trial.model)
        few = min(epochs, -(-FIRST * STEPS * batch_size // trial.size))
        cost = Cost()
        with cost.metered():
            short = train(trial, made, few, batch_size, 0, Path(folder) / "run", resources=budget)
        disk = following.disk_bytes(short.rule, short.state(0), steps)
        training = Plan("training, recorded", cost.seconds / len(short) * steps, cost.peak_memory, disk)
        return _table(_subject(trial, query, short, (steps, epochs), task.size, budget), shown, [training])


def replay_seconds(run: Run, task: Task, query: Dataset, rows: int, resources: Resources | None = None) -> float:
    """Predicted seconds of exact replays of this many rows, from a few measured steps."""
    budget = Resources((resources or Resources()).memory, progress=False)
    return _by_rows(Replay(), _subject(task, query, run, _length(run), rows, budget)).seconds


def _length(run: Run) -> tuple[int, int]:
    """How many steps a run has, and how many epochs."""
    return len(run), run.record(len(run) - 1).epoch + 1


def _subject(
    task: Task, query: Dataset, run: Run, length: tuple[int, int], rows: int, resources: Resources
) -> _Subject:
    trial = task.untraced()
    trial.check = False  # made once, not once per measurement
    queries = batches.size(query)
    few: Dataset = Subset(query, range(min(QUERIES, queries)))
    return _Subject(trial, run, few, queries, rows, *length, resources)


def _table(subject: _Subject, shown: Resources, plans: list[Plan]) -> pd.DataFrame:
    cheap: list[Estimator] = [TracIn(), SGDIE(), DVEmb()]
    if subject.run.rule.linear:
        cheap += [ACC(), ACC(Subspace(8))]
    dear: list[Estimator] = [ACC("exact"), Replay()]
    jobs = [*(partial(_shared, method) for method in cheap), *(partial(_by_rows, method) for method in dear)]
    with _set_aside():
        plans += [one for job in shown.track(jobs, len(jobs), "measuring") for one in _tried(job, subject)]
    frame = pd.DataFrame([plan.__dict__ for plan in plans]).set_index("method")
    return frame.astype({"memory": "int64", "disk": "int64"})


@contextmanager
def _set_aside() -> Iterator[None]:
    """Within it, garbage is not looked for among what was there before: before each measurement, all else is swept."""
    gc.collect()
    ours = not gc.get_freeze_count()
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def _tried(job: Callable[[_Subject], Plan], subject: _Subject) -> list[Plan]:
    """Return a method's plan; nothing where it refuses this run, as some do under BatchNorm or clipping."""
    try:
        return [job(subject)]
    except UnsupportedError:
        return []


def _shared(estimator: Estimator, subject: _Subject) -> Plan:
    """Methods whose vectors serve all rows: so much once, so much per step."""
    run, resources = subject.run, subject.resources

    def scored(task: Task, part: Run) -> Cost:
        return estimator.score(part, task, subject.query, resources=resources).cost

    once, rate, memory = _rate(scored, subject)
    seconds = once + rate * subject.steps + subject.query_seconds
    estimator = estimator.resolved(run, subject.task)
    if not isinstance(estimator, ACC) or estimator.transport == "jump":
        return Plan(estimator.name, seconds, memory, 0)
    # The rows that a full run touches and the first steps do not.
    rows = subject.rows * nbytes(Trajectory(run, subject.task).initial())
    fits = rows <= resources.bytes
    return Plan(estimator.name, seconds, memory + rows if fits else memory, 0 if fits else rows)


def _by_rows(estimator: Estimator, subject: _Subject) -> Plan:
    """Methods whose cost grows with the rows: measured on two numbers of them, and scaled to all."""
    replayed = isinstance(estimator, Replay)
    used = subject.run.record(0).ids.tolist()  # a replay begins with the first step that uses its example

    def scored(count: int, task: Task, part: Run) -> Cost:
        groups = [[used[i % len(used)]] for i in range(count)]
        return estimator.score(part, task, subject.query, groups=groups, resources=subject.resources).cost

    count = min(FEWEST, subject.rows)
    begun = _begun(partial(scored, count), subject)
    while count < subject.rows and begun.seconds < SHARE / TIMES:
        count = min(TIMES * count, subject.rows)
        begun = _begun(partial(scored, count), subject)
    less = max(1, count // TIMES)
    once, rate, memory = _rate(partial(scored, count), subject, begun)
    reading = _losses_seconds(subject) * subject.rows if replayed else subject.query_seconds
    if count == subject.rows:
        return Plan(estimator.name, once + rate * subject.steps + reading, memory, 0)
    slower, least = _rate(partial(scored, less), subject)[1:]
    each = max(0.0, rate - slower) / (count - less)
    if each == 0.0:
        each = rate / count  # too close to tell apart: as if nothing were shared
    if replayed:
        each *= 1 - 0.5 / subject.epochs  # first met in the midst of the first epoch
    more = subject.rows - count
    held = min(max(0, memory - least) // (count - less) * more, subject.resources.bytes)
    return Plan(estimator.name, once + (rate + each * more) * subject.steps + reading, memory + held, 0)


def _measured(scored: Callable[[Task, Run], Cost], task: Task, run: Run) -> Cost:
    """What a scoring took; the time in which the processor did something else, or waited for data, is not counted."""
    wall, own = time.perf_counter(), time.process_time()
    cost = scored(task, run)
    share = (time.process_time() - own) / (time.perf_counter() - wall)
    return replace(cost, seconds=cost.seconds * min(1.0, share))


def _begun(scored: Callable[[Task, Run], Cost], subject: _Subject) -> Cost:
    """What the first steps cost, with what is done once."""
    gc.collect()  # in the midst of it, a sweep would be taken for work
    return _measured(scored, subject.task.quiet(), subject.run.head(min(FIRST, len(subject.run))))


def _rate(
    scored: Callable[[Task, Run], Cost], subject: _Subject, begun: Cost | None = None
) -> tuple[float, float, int]:
    """Seconds once and per step, and the largest memory; from traces where steps are so quick that these matter."""
    run, quiet = subject.run, subject.task.quiet()
    first = min(FIRST, len(run))
    begun = begun or _begun(scored, subject)
    if begun.seconds > SHARE or first == len(run):
        return 0.0, begun.seconds / first, begun.peak_memory
    more = min(len(run), STEPS)
    cost = _measured(scored, quiet, run.head(more))
    rate = max(0.0, (cost.seconds - begun.seconds) / max(1, more - first))
    once = max(0.0, cost.seconds - more * rate)
    if rate > QUICK or more < STEPS:
        return once, rate, cost.peak_memory
    traced = subject.task.untraced()
    few, many = run.head(more), run.head(min(len(run), 3 * STEPS))
    cold = _measured(scored, traced, few)  # what is repeated often enough is traced here
    if len(many) == len(few):
        return 0.0, cold.seconds / len(few), cold.peak_memory
    short, long = (min(_measured(scored, traced, part).seconds for _ in range(2)) for part in (few, many))
    rate = max(0.0, (long - short) / (len(many) - len(few)))
    return max(0.0, cold.seconds - len(few) * rate), rate, cold.peak_memory


def _losses_seconds(subject: _Subject) -> float:
    """What the losses of the queries that were not measured take under one more model."""
    query = _queries(subject)
    stack: Params = {name: tensor.expand(8, *tensor.shape) for name, tensor in query.params.items()}
    return _timed(lambda: query.losses(stack)) / 8 * max(0.0, subject.ratio - 1)


def _queries(subject: _Subject) -> Query:
    params = Trajectory(subject.run, subject.task).initial()[PARAM]
    return Query(subject.task, params, subject.query, single=False, resources=subject.resources)


def _timed(work: Callable[[], object]) -> float:
    work()
    wall, own = time.perf_counter(), time.process_time()
    work()
    return min(time.perf_counter() - wall, time.process_time() - own)
