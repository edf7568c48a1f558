"""Several methods at once: those that can share a sweep do so."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeGuard

from torch.utils.data import Dataset

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
    for unit in sharing(estimators, question.run, question.task):
        wanted = [one for one in unit if one not in finished]
        if not wanted:
            continue
        acc = unit[0].resolved(question.run, question.task)
        if not _has_plain(acc):
            yield unit[0], unit[0].answer(question)
            continue
        request = acc.request(question)
        products = _swept(acc, request)
        for one in wanted:
            corrected = one is unit[0]
            name, values = (acc.name, products.corrected) if corrected else (one.name, products.plain)
            yield one, request.scores(name, values)


def sharing(estimators: Sequence[Estimator], run: Run, task: Task) -> list[list[Estimator]]:
    """Return the estimators that share a sweep together: ACC with its SGD-IE first, then each of the others alone."""
    waiting = list(dict.fromkeys(estimators))
    units: list[list[Estimator]] = []
    for estimator in estimators:
        acc = estimator.resolved(run, task)
        if estimator in waiting and _has_plain(acc):
            sgdie = SGDIE(readout=acc.readout, layers=acc.layers, kinks=acc.kinks)
            units.append([one for one in (estimator, sgdie) if one in waiting])
            waiting = [one for one in waiting if one not in units[-1]]
    return units + [[one] for one in waiting]


def _has_plain(estimator: Estimator) -> TypeGuard[ACC]:
    """Say whether an estimator's sweep has the scores of SGD-IE as well."""
    return isinstance(estimator, ACC) and estimator.transport != "exact"


def _swept(acc: ACC, request: Request) -> Products:
    """Compute the scores of ACC with a cheap transport, and those of SGD-IE, which its sweep has as well."""
    with request.cost.metered(request.trajectory.task.device):
        choice = acc.choice()
        choice.schedule.check(request.trajectory.run)
        return choice.scores(request)
