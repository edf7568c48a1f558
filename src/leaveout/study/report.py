"""Writes the page from answers, and asks for those that are missing; one that cannot be had does not stop the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.utils.data import Dataset

from leaveout._util.files import check_writable, free, save_text
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, LeaveoutError, UnsupportedError, first_line
from leaveout.estimators.timeline import Timeline
from leaveout.estimators.timeline import timeline as find_timeline
from leaveout.evaluate.check import Check
from leaveout.evaluate.curve import Curve
from leaveout.evaluate.label_issues import Labels
from leaveout.evaluate.labels import labels as find_labels
from leaveout.evaluate.opinions import Opinions, opinions
from leaveout.reporting import Page, Show, Topic, gather, page
from leaveout.reporting.show import show_of
from leaveout.run.reader import Run
from leaveout.scores import EACH, SELF, Scores
from leaveout.task import batches
from leaveout.task.task import Task
from leaveout.trajectory.trajectory import Trajectory

T = TypeVar("T")


def report(
    path: str | Path,
    run: Run,
    scores: Scores | Sequence[Scores],
    check: Check | Sequence[Check] | None = None,
    curve: Curve | None = None,
    *,
    labels: Labels | Callable[[], Labels] | None = None,
    task: Task | None = None,
    query: Dataset | None = None,
    show: Show | Callable[[Any], Any] | None = None,
    timeline: Timeline | Callable[..., Timeline] | None = None,
    overwrite: bool = False,
    resources: Resources | None = None,
) -> Page:
    """Write one HTML page that needs no network and no other file, and return its path, which a notebook shows.

    Args:
        path: the file to write; an existing one is replaced only with ``overwrite=True``.
        run: the recorded run.
        scores: the scores to report, by one method or several; the first is shown first. One method may come twice,
            with a column per query as well.
        check: the result of ``verify`` for these scores; without it the page says that they were not checked.
        curve: the result of ``cleanse``.
        labels: what ``lo.labels`` returned; for a classifier it is called if this is not given.
        task: what was trained; with it the page shows examples, labels and the model's predictions.
        query: the query set that was scored; with it the page says when influence arose, and shows the queries.
        show: how examples are shown, by a ``Show`` or by a function of an example; by default pictures, texts or rows.
        timeline: what ``lo.timeline`` returned for the same rows; with ``query`` it is called if this is not given.
        overwrite: replace an existing file.
        resources: memory budget and progress.
    """
    check_writable(Path(path))
    path = free(path, overwrite=overwrite)
    given = [scores] if isinstance(scores, Scores) else list(scores)
    checks = [check] if isinstance(check, Check) else list(check or ())
    _check_given(run, given, checks, task, query)
    if curve is not None:
        curve.check_same_run(run)
    if isinstance(labels, Labels):
        labels.check_same_run(run)
    how, resources = show_of(show), resources or Resources()
    names = [one.method for one in given]
    methods = [one for place, one in enumerate(given) if names.index(one.method) == place]
    topic = Topic(
        run,
        methods[0],
        task,
        query,
        how,
        others=tuple(methods[1:]),
        checks={one.method: one for one in checks},
        by_query=next((one for one in given if one.queries == EACH), None),
    )
    save_text(path, page(gather(_filled(topic, labels, timeline, resources), curve)))
    return Page(path)


def _check_given(run: Run, given: list[Scores], checks: list[Check], task: Task | None, query: Dataset | None) -> None:
    """Refuse scores that cannot be shown together, and checks of other scores."""
    if not given:
        raise InputError("No scores were given: give those of at least one method.", code="report-without-scores")
    for scores in given:
        scores.check_same_run(run)
    names = [(scores.method, scores.queries == EACH) for scores in given]
    if len(set(names)) < len(names):
        raise InputError(
            f"The methods' names {[name for name, _ in names]} are not all different: give each method's scores once.",
            code="methods-repeated",
        )
    if query is not None and task is None:
        raise InputError(
            "A query set was given without its task: give task= as well, which knows how to read it.",
            code="query-without-task",
        )
    for check in checks:
        if check.method not in {scores.method for scores in given}:
            check.check_same_scores(given[0])


def _filled(
    topic: Topic,
    labels: Labels | Callable[[], Labels] | None,
    timeline: Timeline | Callable[..., Timeline] | None,
    resources: Resources,
) -> Topic:
    """Ask for the answers that are missing; what cannot be had is left out of the page, with a note that says why."""
    run, task, query, scores, show = topic.run, topic.task, topic.query, topic.scores, topic.show
    notes: list[str] = []

    def tried(what: str, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except InputError:
            raise  # what was given can be put right
        except Exception as error:  # noqa: BLE001 - whatever the model or the data raise, the rest of the page stands
            words = str(error) if isinstance(error, LeaveoutError) else first_line(error)
            notes.append(f"{what} could not be computed: {words}")
            return None

    if task is None:
        return replace(topic, labels=labels if isinstance(labels, Labels) else None)
    if not isinstance(labels, Labels):
        find = labels or partial(find_labels, run, task, classes=show.classes, resources=resources)
        labels = None if topic.groups else tried("Which labels look wrong", lambda: _classified(find))
    if query is not None and scores.queries == SELF:
        notes.append("When influence arose is only computed for query losses, not for an example's own loss.")
    elif query is not None and show.timeline and not isinstance(timeline, Timeline):
        sweep = timeline or partial(find_timeline, run, task, query, resources=resources)
        timeline = tried("When influence arose", partial(_arose, topic, sweep))

    def opinions_on(dataset: Dataset, ids: Sequence[int]) -> Opinions:
        trajectory = Trajectory(run, task)
        params = trajectory.scored(trajectory.final_whole())
        return opinions(task, params, dataset, ids, show.classes, resources)

    what = "What the model predicts for the"
    own = asked = None
    if not topic.groups:
        ids = [int(i) for i in scores.train_ids]
        own = tried(f"{what} examples", lambda: opinions_on(task.train_set, ids))
    if query is not None:
        asked = tried(f"{what} queries", lambda: opinions_on(query, range(batches.size(query))))
    return replace(
        topic,
        labels=labels,
        when=timeline if isinstance(timeline, Timeline) else None,
        own=own,
        asked=asked,
        notes=tuple(notes),
    )


def _classified(find: Callable[[], Labels]) -> Labels | None:
    """Return which labels look wrong; None if no classifier was trained."""
    try:
        return find()
    except UnsupportedError:
        return None


def _arose(topic: Topic, when: Callable[..., Timeline]) -> Timeline | None:
    """Return when influence arose, for the rows that are shown; None if the members of groups are not known."""
    if topic.groups:
        return when(groups=topic.members) if topic.members else None
    everyone = topic.task is not None and topic.scores.train_ids == tuple(range(topic.task.size))
    return when() if everyone else when(ids=list(topic.scores.train_ids))
