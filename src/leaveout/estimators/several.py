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
from leaveout.estimators.sgdie import SGDIE
from leaveout.run.reader import Run
from leaveout.scores import Scores
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
    estimators: Sequence[Estimator], question: Question, there: Collection[Estimator] = ()
) -> Iterator[tuple[Estimator, Scores]]:
    """Yield each estimator with its scores as soon as they are computed: they can be saved before the next begins.

    Estimators that are ``there`` have scores already and are skipped. They still determine which methods share a
    sweep: work that was interrupted between two methods gives the same bits when resumed.
    """
    waiting = dict.fromkeys(estimators)
    for estimator in list(waiting):
        chosen = estimator.resolved(question.run, question.task)
        if isinstance(chosen, ACC) and chosen.transport != "exact":
            beside = SGDIE(readout=chosen.readout, layers=chosen.layers, kinks=chosen.kinks)
            pair = [one for one in (estimator, beside) if one in waiting]
            waiting = {one: None for one in waiting if one not in pair}
            if all(one in there for one in pair):
                continue
            request = chosen.request(question)
            with request.cost.metered(), kept_memory():
                choice = chosen.choice()
                choice.schedule.check(question.run)
                scores = choice.scores(request)
            if estimator not in there:
                yield estimator, request.scores(chosen.name, scores.corrected)
            if beside in pair and beside not in there:
                yield beside, request.scores(beside.name, scores.plain)
    for estimator in waiting:
        if estimator not in there:
            yield estimator, estimator.answer(question)
