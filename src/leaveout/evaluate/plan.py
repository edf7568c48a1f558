"""What every method would need, in time, memory and disk, predicted from a few measured steps."""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from leaveout._util.trees import PARAM, Params, nbytes
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, UnsupportedError
from leaveout.estimators import ACC, SGDIE, DVEmb, Estimator, Replay, TracIn
from leaveout.estimators.query import Query
from leaveout.run import gradient_states
from leaveout.run.reader import Run
from leaveout.run.train import train
from leaveout.sweep.budget import directions_bytes
from leaveout.sweep.transports import EXTRA, SAMPLES, Subspace, search_products
from leaveout.task import batches
from leaveout.task.task import Task
from leaveout.task.trace.tracer import PAYS
from leaveout.trajectory.trajectory import Trajectory

FIRST, STEPS = 2, 8
"""Steps that are measured: the first include one-time work, the others show what a step costs."""

SHARE = 0.25
"""Seconds after which a measurement is long enough: each method takes a few of them."""

SLOW = 2.0
"""The same for images, whose steps are several times as fast as the first ones seem."""

QUICK = 0.05
"""Seconds per step below which it matters that steps are run from a trace."""

QUERIES = 32
"""Queries that are measured; each of the others costs the same."""

STACK = 8
"""Models whose losses are measured at once."""

TOGETHER = 0.005
"""Seconds per step of SGD-IE below which several vectors go through a product in little more time than one."""

FEWEST, TIMES = 4, 4
"""Rows that are measured first if every row has its own model or vector, and the factor for the next number."""


@dataclass(frozen=True)
class Plan:
    """One method's needs: ``seconds`` of scoring, peak ``memory`` and ``disk`` besides the run, both in bytes."""

    method: str
    seconds: float
    memory: int
    disk: int


class _Rate(NamedTuple):
    """What a scoring takes: one-time seconds, seconds per step, and peak memory in bytes."""

    once: float
    per_step: float
    memory: int

    def seconds(self, steps: int) -> float:
        """Predict the seconds of a run with this many steps."""
        return self.once + self.per_step * steps


@dataclass(frozen=True)
class _Subject:
    """What is measured: a part of the run with a few queries, and the size of the whole."""

    task: Task
    run: Run
    query: Dataset
    all_queries: Dataset
    rows: int
    steps: int
    epochs: int
    resources: Resources

    @property
    def queries(self) -> int:
        """The number of queries."""
        return batches.size(self.all_queries)

    @property
    def ratio(self) -> float:
        """The number of queries divided by the number that is measured."""
        return self.queries / batches.size(self.query)

    @cached_property
    def query_seconds(self) -> float:
        """The seconds that the queries which are not measured take: their losses and their gradient, once."""
        return _timed(lambda: _queries(self).check(gradient=True)) * max(0.0, self.ratio - 1)


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
    """Predict seconds, memory and disk of training (for a run that does not exist yet) and of every method on it.

    A few steps are measured with a few queries and rows, which takes seconds, and scaled up: expect the right order of
    magnitude, not exact seconds. ``AdamIE`` and ``InfluenceFunction`` do not sweep over the run's steps: one takes
    every example's gradient once per epoch, the other as many products over all data as conjugate gradients need.
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
    budget = Resources(shown.memory, progress=False)  # a progress bar for every few steps would only flicker
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
        with cost.metered(task.device):
            short = train(trial, made, few, batch_size, 0, Path(folder) / "run", resources=budget)
        disk = gradient_states.disk_bytes(short.rule, short.state(0), steps)
        training = Plan("training, recorded", cost.seconds / len(short) * steps, cost.peak_memory, disk)
        return _table(_subject(trial, query, short, (steps, epochs), task.size, budget), shown, [training])


def _length(run: Run) -> tuple[int, int]:
    """Return the number of steps and of epochs of a run."""
    return len(run), run.record(len(run) - 1).epoch + 1


def _subject(
    task: Task, query: Dataset, run: Run, length: tuple[int, int], rows: int, resources: Resources
) -> _Subject:
    trial = task.anew()
    trial.check = False  # done once, not once per measurement
    few: Dataset = Subset(query, range(min(QUERIES, batches.size(query))))
    return _Subject(trial, run, few, query, rows, *length, resources)


def _table(subject: _Subject, shown: Resources, plans: list[Plan]) -> pd.DataFrame:
    jobs = [partial(_shared, method) for method in (TracIn(), SGDIE(), DVEmb())]
    if subject.run.rule.linear:
        jobs += [partial(_shared, ACC()), partial(_subspace, plans)]
    jobs += [partial(_by_rows, method) for method in (ACC("exact"), Replay())]
    with _set_aside():
        for job in shown.track(jobs, len(jobs), "measuring"):
            plans += _tried(job, subject)
    frame = pd.DataFrame([plan.__dict__ for plan in plans]).set_index("method")
    return frame.astype({"memory": "int64", "disk": "int64"})


@contextmanager
def _set_aside() -> Iterator[None]:
    """Exclude existing objects from garbage collection in this context: collections before measurements are quick."""
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
    """Return a method's plan; nothing if it refuses this run, as some do under BatchNorm or clipping."""
    try:
        return [job(subject)]
    except UnsupportedError:
        return []


def _shared(estimator: Estimator, subject: _Subject) -> Plan:
    """Plan a method whose vectors are shared by all rows: a one-time cost and a cost per step."""
    run, resources = subject.run, subject.resources

    def scored(task: Task, part: Run) -> Cost:
        return estimator.score(part, task, subject.query, resources=resources).cost

    rate = _rate(scored, subject)
    seconds = rate.seconds(subject.steps) + subject.query_seconds
    estimator = estimator.resolved(run, subject.task)
    if not isinstance(estimator, ACC) or estimator.transport == "jump":
        return Plan(estimator.name, seconds, rate.memory, 0)
    # The rows that a full run uses but the first steps do not.
    row_bytes = subject.rows * nbytes(Trajectory(run, subject.task).initial())
    if row_bytes <= resources.bytes:
        return Plan(estimator.name, seconds, rate.memory + row_bytes, 0)
    return Plan(estimator.name, seconds, rate.memory, row_bytes)


def _subspace(plans: Sequence[Plan], subject: _Subject) -> Plan:
    """Plan subspace transport; where a product takes long, from the plans of SGD-IE and of free transport.

    One step of SGD-IE takes about as long as one of the products that it has in addition.
    """
    rank = 8
    estimator = ACC(Subspace(rank))
    known = {plan.method: plan for plan in plans}
    free, shared = known.get(ACC("free").name), known.get(SGDIE().name)
    if free is None or shared is None or shared.seconds < TOGETHER * subject.steps:
        return _shared(estimator, subject)
    width, product = rank + EXTRA, shared.seconds / subject.steps
    products = rank * subject.steps + search_products(width, subject.steps)
    held = directions_bytes(Trajectory(subject.run, subject.task), width, SAMPLES)
    return replace(free, method=estimator.name, seconds=free.seconds + product * products, memory=free.memory + held)


def _by_rows(estimator: Estimator, subject: _Subject) -> Plan:
    """Plan a method whose cost grows with the rows: measured for two numbers of rows, and scaled to all."""
    replayed = isinstance(estimator, Replay)
    used = subject.run.record(0).ids.tolist()  # a replay begins at the first step that uses its example

    def scored(count: int, task: Task, part: Run) -> Cost:
        groups = [[used[i % len(used)]] for i in range(count)]
        return estimator.score(part, task, subject.query, groups=groups, resources=subject.resources).cost

    images = subject.task.objective.execution.images
    count = min(2 * FEWEST - 1 if images and replayed else FEWEST, subject.rows)  # the whole model is replayed as well
    first_steps = _first_steps(partial(scored, count), subject)
    while count < subject.rows and first_steps.seconds < SHARE / TIMES:
        count = min(TIMES * count, subject.rows)
        first_steps = _first_steps(partial(scored, count), subject)
    rate = _rate(partial(scored, count), subject, first_steps)
    reading = _losses_seconds(subject) * subject.rows if replayed else subject.query_seconds
    if count == subject.rows:
        return Plan(estimator.name, rate.seconds(subject.steps) + reading, rate.memory, 0)
    if images:  # nearly all work is that of the rows, and a second number of them would be traced anew
        row_seconds, row_bytes = rate.per_step / (count + replayed), rate.memory // count
    else:
        fewer = max(1, count // TIMES)
        other = _rate(partial(scored, fewer), subject)
        row_seconds = max(0.0, rate.per_step - other.per_step) / (count - fewer)
        row_bytes = max(0, rate.memory - other.memory) // (count - fewer)
    if row_seconds == 0.0:
        row_seconds = rate.per_step / count  # too close to distinguish: assume that nothing is shared
    if replayed:
        row_seconds *= 1 - 0.5 / subject.epochs  # first used in the middle of the first epoch, on average
    more = subject.rows - count
    seconds = rate.seconds(subject.steps) + row_seconds * more * subject.steps
    memory = rate.memory + min(row_bytes * more, subject.resources.bytes)
    return Plan(estimator.name, seconds + reading, memory, 0)


def _measured(scored: Callable[[Task, Run], Cost], task: Task, run: Run) -> Cost:
    """Return the cost of a scoring; time in which the processor did something else or waited is not counted."""
    wall, own = time.perf_counter(), time.process_time()
    cost = scored(task, run)
    share = (time.process_time() - own) / (time.perf_counter() - wall)
    return replace(cost, seconds=cost.seconds * min(1.0, share))


def _first_steps(scored: Callable[[Task, Run], Cost], subject: _Subject) -> Cost:
    """Return the cost of the first steps, including one-time work."""
    gc.collect()  # a collection during the measurement would be counted as work
    return _measured(
        scored, subject.task.of(subject.task.objective.untraced()), subject.run.head(min(FIRST, len(subject.run)))
    )


def _rate(scored: Callable[[Task, Run], Cost], subject: _Subject, first_steps: Cost | None = None) -> _Rate:
    """Measure what a scoring takes; from traces if the whole run would use them."""
    run, images = subject.run, subject.task.objective.execution.images
    first = min(FIRST, len(run))
    begun = first_steps or _first_steps(scored, subject)
    if begun.seconds > (SLOW if images else SHARE) or first == len(run):
        return _Rate(0.0, begun.seconds / first, begun.peak_memory)
    more = min(len(run), STEPS)
    if images:  # traced at once, and several times as fast
        return _traced_rate(scored, subject, first, more)
    traced = more == STEPS and subject.steps > PAYS
    if not traced or begun.seconds > QUICK * first:
        cost = _measured(scored, subject.task.of(subject.task.objective.untraced()), run.head(more))
        rate = max(0.0, (cost.seconds - begun.seconds) / max(1, more - first))
        if not traced or rate > QUICK:
            return _Rate(max(0.0, cost.seconds - more * rate), rate, cost.peak_memory)
    return _traced_rate(scored, subject, more, min(len(run), 3 * STEPS))


def _traced_rate(scored: Callable[[Task, Run], Cost], subject: _Subject, few: int, many: int) -> _Rate:
    """Return the same from two numbers of steps, of which the smaller is enough for all traces to be made."""
    task = subject.task.anew()
    task.objective.execution.tracer.expect(subject.steps)
    cold = _measured(scored, task, subject.run.head(few))
    if many == few:
        return _Rate(0.0, cold.seconds / few, cold.peak_memory)
    rounds = 1 if subject.task.objective.execution.images else 2
    short, long = (
        min(_measured(scored, task, subject.run.head(steps)).seconds for _ in range(rounds)) for steps in (few, many)
    )
    rate = max(0.0, (long - short) / (many - few))
    return _Rate(max(0.0, cold.seconds - few * rate), rate, cold.peak_memory)


def _losses_seconds(subject: _Subject) -> float:
    """Return the seconds that the losses of the queries which were not measured take per model."""
    measured = batches.size(subject.query)
    more = min(subject.queries, 4 * measured)
    if more == measured:
        return 0.0
    few, many = (_stack_seconds(subject, range(count)) for count in (measured, more))
    return max(0.0, many - few) / (more - measured) * (subject.queries - measured) / STACK


def _stack_seconds(subject: _Subject, queries: range) -> float:
    """Return the seconds that these queries' losses take for a few models at once."""
    query = _queries(replace(subject, query=Subset(subject.all_queries, queries)))
    stack: Params = {name: tensor.expand(STACK, *tensor.shape) for name, tensor in query.params.items()}
    return min(_timed(lambda: query.losses(stack)) for _ in range(3))


def _queries(subject: _Subject) -> Query:
    params = Trajectory(subject.run, subject.task).initial()[PARAM]
    return Query(subject.task, params, subject.query, single=False, resources=subject.resources)


def _timed(work: Callable[[], object]) -> float:
    work()
    wall, own = time.perf_counter(), time.process_time()
    work()
    return min(time.perf_counter() - wall, time.process_time() - own)
