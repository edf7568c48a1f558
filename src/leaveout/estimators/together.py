"""Several methods at once: those that share a sweep take it together."""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.data import Dataset

from leaveout.errors import InputError
from leaveout.estimators.acc import ACC
from leaveout.estimators.base import Estimator
from leaveout.estimators.sgdie import SGDIE
from leaveout.members import Groups
from leaveout.memory import kept_memory
from leaveout.resources import Resources
from leaveout.scores import Scores
from leaveout.store import Run
from leaveout.task import Task


def score(
    estimators: Sequence[Estimator],
    run: Run,
    task: Task,
    query: Dataset,
    *,
    queries: str = "mean",
    groups: Groups | None = None,
    resources: Resources | None = None,
) -> list[Scores]:
    """The scores of every estimator, in their order.

    SGD-IE comes for nothing from the sweep of an ACC with a cheap transport and the same readout; their scores then
    carry the same cost, that of both.
    """
    if not estimators:
        raise InputError("No estimator was given: give at least one, such as lo.ACC().")
    found: dict[Estimator, Scores] = {}
    for estimator in estimators:
        if isinstance(estimator, ACC) and estimator.transport != "exact":
            request = estimator.request(run, task, query, queries, groups, False, resources)
            with request.cost.metered(), kept_memory():
                products = estimator.products(request)
                corrected = estimator.read(request, products.corrected)
                plain = estimator.read(request, products.plain)
            found[estimator] = request.scores(estimator.name, corrected)
            beside = SGDIE(readout=estimator.readout)
            found.setdefault(beside, request.scores(beside.name, plain))
    for estimator in estimators:
        if estimator not in found:
            found[estimator] = estimator.score(run, task, query, queries=queries, groups=groups, resources=resources)
    return [found[estimator] for estimator in estimators]
