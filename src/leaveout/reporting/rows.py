"""The rows of a report: which are listed, what they look like, and which of them drive a query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from leaveout.reporting import content
from leaveout.reporting.content import digits, rounded
from leaveout.reporting.topic import Topic

LISTED = 20_000
"""The most rows on the page; if there are more, the most extreme."""
ISSUES = 5_000
"""The most labels that are listed as wrong; if there are more, the most suspicious."""
QUERIES = 100
DRIVERS = 6
PICTURE_BYTES = 6_000_000

Drivers = list[tuple[int, float]]


def chosen_queries(topic: Topic) -> list[int]:
    """Choose the queries that are shown: those with the largest loss first."""
    if topic.by_query is None:
        return []
    columns = list(range(len(topic.by_query.query_ids)))
    if topic.asked is not None:
        columns = torch.argsort(topic.asked.losses, descending=True, stable=True).tolist()
    return columns[:QUERIES]


def drivers(column: Float[Tensor, " train"]) -> Drivers:
    """Return the rows that did a query most harm, worst first, then those that helped it most, best last."""
    order = torch.argsort(column, stable=True).tolist()
    half = min(DRIVERS, len(order) // 2)
    return [(row, digits(float(column[row]))) for row in order[:half] + order[len(order) - half :]]


def listed(mean: Float[Tensor, " train"], needed: set[int]) -> list[int]:
    """Return the rows for the page, most harmful first: all, or the most extreme and those that are needed."""
    order = torch.argsort(mean, stable=True).tolist()
    half = min(LISTED, len(order)) // 2
    ends = order[:half] + order[len(order) - (min(LISTED, len(order)) - half) :]
    values = mean.tolist()
    return sorted(set(ends) | needed, key=lambda row: (values[row], row))


def suspects(topic: Topic) -> list[int]:
    """Return the rows whose labels look wrong, the most suspicious first."""
    if topic.labels is None or topic.groups:
        return []
    at = {int(number): row for row, number in enumerate(topic.scores.train_ids)}
    return [at[number] for number in topic.labels.ids if number in at][:ISSUES]


def issues(topic: Topic, place: dict[int, int], names: list[str]) -> content.Issues | None:
    """Return the labels that look wrong, by place in the table; names that only occur as suggestions are added."""
    if topic.labels is None or topic.groups:
        return None
    rows = suspects(topic)
    ids = [int(topic.scores.train_ids[row]) for row in rows]
    frame, classes = topic.labels.table.loc[ids], topic.show.classes
    suggested = []
    for label in frame["predicted_label"].tolist():
        name = str(classes[label]) if classes and isinstance(label, int) else str(label)
        if name not in names:
            names.append(name)
        suggested.append(names.index(name))
    return content.Issues(
        len(topic.labels),
        topic.labels.folds,
        [place[row] for row in rows],
        suggested,
        rounded(frame["label_score"].tolist()),
        [str(why) for why in frame["why"].tolist()],
    )


def ends(count: int, top: int) -> list[int]:
    """Return places from both ends inward, so that the least important ones are cut off.

    >>> ends(5, 2)
    [0, 4, 1, 3]
    """
    return list(dict.fromkeys(place for i in range(min(top, count)) for place in (i, count - 1 - i)))


def table(topic: Topic, rows: list[int]) -> content.Table:
    """Return the listed rows, column by column."""
    scores, own = topic.scores, topic.own
    basic: dict[str, Any] = {"id": [scores.train_ids[row] for row in rows]}
    if own is None:
        return content.Table(**basic)
    names = {name: i for i, name in enumerate(dict.fromkeys([*own.labels, *own.says]))}
    return content.Table(
        **basic,
        names=list(names),
        label=[names[own.labels[row]] for row in rows] if own.labels else [],
        says=[names[own.says[row]] for row in rows] if own.says else [],
        p=rounded(own.p[rows].tolist()) if own.p is not None else [],
    )


def looks(
    topic: Topic, rows: list[int], places: Sequence[int], queries: Sequence[int]
) -> tuple[dict[int, content.Shown], dict[int, content.Shown], bool]:
    """Show what rows and queries look like, in order of importance; False if the page's budget is used up."""
    show, task = topic.show, topic.task
    train: Any = show.train if show.train is not None or task is None else task.train_set
    query: Any = show.query if show.query is not None else topic.query
    shown: dict[int, content.Shown] = {}
    asked: dict[int, content.Shown] = {}
    jobs = [(asked, q, query, q) for q in queries]
    if topic.groups:
        sizes = {name: len(ids) for name, ids in (topic.members or {}).items()}
        named = {place: str(topic.scores.train_ids[rows[place]]) for place in places}
        shown |= {place: content.Shown(text=f"{sizes[name]:,} examples") for place, name in named.items() if sizes}
    else:
        jobs = [(shown, place, train, int(topic.scores.train_ids[rows[place]])) for place in places] + jobs
    left = PICTURE_BYTES
    for target, key, source, number in jobs:
        if source is None or key in target:
            continue
        seen = show.shown(source[number], number if target is shown else None)
        left -= len(seen.picture) + len(seen.text)
        if left < 0:
            return shown, asked, False
        target[key] = seen
    return shown, asked, True


def query_of(
    topic: Topic, column: int, pairs: Drivers, place: dict[int, int], looks: dict[int, content.Shown]
) -> content.Query:
    """Return a query with the places of the rows that drive it."""
    asked, half = topic.asked, len(pairs) // 2
    ids = () if topic.by_query is None else topic.by_query.query_ids
    placed = [(place[row], value) for row, value in pairs]
    return content.Query(
        id=ids[column],
        shown=looks.get(column, content.Shown()),
        label=asked.labels[column] if asked and asked.labels else "",
        says=asked.says[column] if asked and asked.says else "",
        p=digits(float(asked.p[column])) if asked and asked.p is not None else None,
        loss=digits(float(asked.losses[column])) if asked else None,
        harmful=placed[:half],
        helpful=placed[half:][::-1],
    )


def histogram(values: Float[Tensor, " train"], bins: int = 48) -> content.Histogram:
    """Count values in bins of equal width, with zero as an edge.

    >>> histogram(torch.tensor([-1.0, 0.0, 0.5, 3.0]), bins=4)
    Histogram(edges=[-1.0, 0.0, 1.0, 2.0, 3.0], counts=[1, 2, 0, 1])
    """
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    width = (high - low) / bins or 1.0
    first, last = -math.ceil(-low / width - 1e-9), max(1, math.ceil(high / width - 1e-9))
    place = torch.floor(values.double() / width + 1e-9).long().clamp(first, last - 1)
    counts = torch.bincount(place - first, minlength=last - first)
    return content.Histogram(rounded([i * width for i in range(first, last + 1)]), counts.tolist())
