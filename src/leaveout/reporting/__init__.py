"""The report: one self-contained page about a run, its scores, and how far to trust them.

``gather`` turns a ``topic`` (a run, its scores, its data) into the plain data of ``content``; ``page``
builds the HTML from that alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from leaveout._util.files import check_writable, free, save_text
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, UnsupportedError
from leaveout.evaluate.curve import Curve
from leaveout.evaluate.label_issues import Labels
from leaveout.evaluate.labels import labels as find_labels
from leaveout.evaluate.verify import Check
from leaveout.reporting.gather import gather
from leaveout.reporting.page import Page, page
from leaveout.reporting.show import Show, show_of
from leaveout.reporting.topic import Topic
from leaveout.run.reader import Run
from leaveout.scores import Scores
from leaveout.task.task import Task

__all__ = ["Page", "Show", "report"]


def report(
    path: str | Path,
    run: Run,
    scores: Scores | Sequence[Scores],
    check: Check | Sequence[Check] | None = None,
    curve: Curve | None = None,
    *,
    labels: Labels | None = None,
    task: Task | None = None,
    query: Dataset | None = None,
    show: Show | Callable[[Any], Any] | None = None,
    overwrite: bool = False,
    resources: Resources | None = None,
) -> Page:
    """Write one HTML page that needs no network and no other file, and return its path, which a notebook shows.

    Args:
        path: the file to write; an existing one is replaced only with ``overwrite=True``.
        run: the recorded run.
        scores: the scores to report, by one method or several; the first is shown first.
        check: the result of ``verify`` for these scores; without it the page says that they were not checked.
        curve: the result of ``cleanse``.
        labels: what ``lo.labels`` returned; for a classifier it is called if this is not given.
        task: what was trained; with it the page shows examples, labels and the model's predictions.
        query: the query set that was scored; with it the page says when influence arose, and shows the queries.
        show: how examples are shown, by a ``Show`` or by a function of an example; by default pictures, texts or rows.
        overwrite: replace an existing file.
        resources: memory budget and progress.
    """
    check_writable(Path(path))
    path = free(path, overwrite=overwrite)
    methods = [scores] if isinstance(scores, Scores) else list(scores)
    checks = [check] if isinstance(check, Check) else list(check or ())
    _check_given(run, methods, checks)
    if curve is not None:
        curve.check_same_run(run)
    how, resources = show_of(show), resources or Resources()
    if labels is not None:
        labels.check_same_run(run)
    else:
        labels = _labels(run, task, methods[0], how, resources)
    by_method = {one.method: one for one in checks}
    topic = Topic(run, methods[0], task, query, how, resources, tuple(methods[1:]), by_method, labels)
    save_text(path, page(gather(topic, curve)))
    return Page(path)


def _check_given(run: Run, methods: list[Scores], checks: list[Check]) -> None:
    """Refuse scores that cannot be shown together, and checks of other scores."""
    if not methods:
        raise InputError("No scores were given: give those of at least one method.", code="report-without-scores")
    for scores in methods:
        scores.check_same_run(run)
    names = [scores.method for scores in methods]
    if len(set(names)) < len(names):
        raise InputError(
            f"The methods' names {names} are not all different: give each method's scores once.",
            code="methods-repeated",
        )
    for check in checks:
        if check.method not in names:
            check.check_same_scores(methods[0])


def _labels(run: Run, task: Task | None, scores: Scores, show: Show, resources: Resources) -> Labels | None:
    """Find which labels look wrong, if a classifier was trained and examples were scored."""
    if task is None or any(isinstance(name, str) for name in scores.train_ids):
        return None
    try:
        return find_labels(run, task, classes=show.classes, resources=resources)
    except UnsupportedError:
        return None
