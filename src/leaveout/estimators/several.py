"""Several methods at once: those that can share a sweep do so."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch.utils.data import Dataset

from leaveout._util.allocator import kept_memory
from leaveout.compute.resources import Resources
from leaveout.errors import InputError
from leaveout.estimators.acc import ACC
from leaveout.estimators.base import Estimator
from leaveout.estimators.question import Question
from leaveout.estimators.request import Request
from leaveout.estimators.sgdie import SGDIE
from leaveout.run.reader import Run
from leaveout.scores import Scores
from leaveout.sweep.fast_acc import Products
from leaveout.task.task import Task
from leaveout.trajectory.left_out import Groups


def score(
    estimators: Estimator | Sequence[Estimator],
    run: Run,
    task: Task,
    query: Dataset,
    *,
    queries: str = "mean",
    ids: Sequence[int] | None = None,
    groups: Groups | None = None,
    resources: Resources | None = None,
    at: int | str | None = None,
) -> list[Scores]:
    """Score with every estimator, in their order; with ``at``, the model after that many steps.

    SGD-IE comes for free with the sweep of an ACC with a cheap transport and the same readout; both scores then report
    the same cost, that of both.
    """
    estimators = [estimators] if isinstance(estimators, Estimator) else list(estimators)
    if not estimators:
        raise InputError("No estimator was given: give at least one, such as lo.ACC().", code="estimator-missing")
    question = Question(run, task, query, queries, ids, groups, resources=resources or Resources(), at=at)
    results = dict(one_by_one(estimators, question))
    return [results[estimator] for estimator in estimators]


def one_by_one(
    estimators: Sequence[Estimator], question: Question, finished: Collection[Estimator] = ()
) -> Iterator[tuple[Estimator, Scores]]:
    """Yield each estimator with its scores as soon as they are computed: they can be saved before the next begins.

    Those of ``finished`` estimators are there already, and are skipped. They still determine which methods share a
    sweep: work that was interrupted between two methods gives the same bits when resumed.
    """
    waiting = list(dict.fromkeys(estimators))
    for estimator in list(waiting):
        acc = estimator.resolved(question.run, question.task)
        if not isinstance(acc, ACC) or acc.transport == "exact":
            continue
        sgdie = SGDIE(readout=acc.readout, layers=acc.layers, kinks=acc.kinks)
        pair = [one for one in (estimator, sgdie) if one in waiting]
        waiting = [one for one in waiting if one not in pair]
        wanted = [one for one in pair if one not in finished]
        if not wanted:
            continue
        request = acc.request(question)
        products = _swept(acc, request)
        if estimator in wanted:
            yield estimator, request.scores(acc.name, products.corrected)
        if sgdie in wanted:
            yield sgdie, request.scores(sgdie.name, products.plain)
    for estimator in waiting:
        if estimator not in finished:
            yield estimator, estimator.answer(question)


def _swept(acc: ACC, request: Request) -> Products:
    """Compute the scores of ACC with a cheap transport, and those of SGD-IE, which its sweep has as well."""
    with request.cost.metered(), kept_memory():
        choice = acc.choice()
        choice.schedule.check(request.trajectory.run)
        return choice.scores(request)
