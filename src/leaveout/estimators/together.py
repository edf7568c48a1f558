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
    estimators: Estimator | Sequence[Estimator],
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
    estimators = [estimators] if isinstance(estimators, Estimator) else list(estimators)
    if not estimators:
        raise InputError("No estimator was given: give at least one, such as lo.ACC().")
    found: dict[Estimator, Scores] = {}
    for estimator in estimators:
        chosen = estimator.resolved(run)
        if isinstance(chosen, ACC) and chosen.transport != "exact":
            request = chosen.request(run, task, query, queries, groups, False, resources)
            with request.cost.metered(), kept_memory():
                products = chosen.products(request)
                corrected = chosen.read(request, products.corrected)
                plain = chosen.read(request, products.plain)
            found[estimator] = request.scores(chosen.name, corrected)
            beside = SGDIE(readout=chosen.readout)
            found.setdefault(beside, request.scores(beside.name, plain))
    for estimator in estimators:
        if estimator not in found:
            found[estimator] = estimator.score(run, task, query, queries=queries, groups=groups, resources=resources)
    return [found[estimator] for estimator in estimators]
