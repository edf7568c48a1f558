"""From a run, its scores and its data to the plain content of a report."""

from __future__ import annotations

from datetime import date
from typing import Any

from leaveout.errors import UnsupportedError
from leaveout.estimators.timeline import Timeline, timeline
from leaveout.evaluate.verify import Check
from leaveout.reporting import content, rows, words
from leaveout.reporting.content import digits, rounded
from leaveout.reporting.topic import Topic, membership
from leaveout.scores import SELF

PARTS = 50


def gather(topic: Topic, check: Check | None, cleansing: content.Cleansing | None) -> content.Content:
    """Gather everything that the page says."""
    scores, show, mean = topic.scores, topic.show, topic.mean
    if check is not None:
        check.check_same_scores(scores)
    when, notes = _timeline(topic)
    columns = rows.chosen_queries(topic)
    drivers = {column: rows.drivers(scores.values[:, column]) for column in columns}
    listed = rows.listed(scores, {row for pairs in drivers.values() for row, _ in pairs})
    place = {row: i for i, row in enumerate(listed)}
    # Order of weight: the extremes of the mean, then the drivers of each query.
    first = rows.ends(len(listed), show.top)
    places = list(dict.fromkeys([*first, *(place[row] for pairs in drivers.values() for row, _ in pairs)]))
    shown, asked, whole = rows.looks(topic, listed, places, columns)
    if not whole:
        notes.append(f"Pictures beyond {rows.PICTURE_BYTES // 10**6} MB were left out.")
    if len(listed) < len(mean):
        notes.append(f"The {len(listed):,} most extreme of {len(mean):,} scores are listed; sums are over all scores.")
    table = rows.table(topic, listed)
    parts_of, parts = _parts(topic, when)
    return content.Content(
        title=show.title or f"Training data influence: {topic.run.path.name}",
        made=date.today().isoformat(),
        method=scores.method,
        groups=topic.groups,
        unit="" if topic.loss else scores.unit,
        summary=[
            words.trained(topic.run, topic.task),
            words.scored(scores, topic.queries, groups=topic.groups),
            words.found(table, len(mean), int((mean < 0).sum()), groups=topic.groups, loss=topic.loss),
        ],
        facts=_facts(topic),
        notes=notes,
        trust=words.trusted(scores, check),
        total=len(mean),
        histogram=rows.histogram(mean),
        table=table,
        shown=shown,
        spans=list(when.spans) if when else [],
        lines={i: rounded(when.values[listed[i]].tolist()) for i in places} if when else {},
        queries=[rows.query_of(topic, column, drivers[column], place, asked) for column in columns],
        parts_of=parts_of,
        parts=parts,
        check=_checked(check) if check else None,
        cleansing=cleansing,
    )


def _timeline(topic: Topic) -> tuple[Timeline | None, list[str]]:
    """Say when influence arose, where that can be known, and note where it cannot."""
    show, task, query, scores = topic.show, topic.task, topic.query, topic.scores
    if task is None or query is None or not show.timeline or (topic.groups and topic.members is None):
        return None, []
    if scores.queries == SELF:
        return None, ["When influence arose is only computed for query losses, not for an example's own loss."]
    which: dict[str, Any] = {"groups": topic.members} if topic.groups else {"ids": list(scores.train_ids)}
    try:
        result = timeline(topic.run, task, query, resources=topic.resources, **which)
    except UnsupportedError as error:
        return None, [f"When influence arose could not be computed: {error}"]
    result.check_same_queries(scores)
    return result, []


def _parts(topic: Topic, when: Timeline | None) -> tuple[str, list[content.Part]]:
    """Sum influence by group if there are such, otherwise by class."""
    own, groups = topic.own, topic.show.groups
    kinds: dict[str, list[int]] = {}
    if topic.groups:
        return "", []
    if groups is not None:
        at = {int(i): row for row, i in enumerate(topic.scores.train_ids)}
        members = membership(max(at) + 1 if topic.task is None else topic.task.size, groups)
        kinds = {name: [at[i] for i in ids if i in at] for name, ids in members.items()}
    elif own is not None and own.p is not None:  # labels of classes, not of numbers
        for row, label in enumerate(own.labels):
            kinds.setdefault(label, []).append(row)
    if len(kinds) > PARTS:
        return "", []
    if groups is None:  # in the order of the classes
        order = {str(name): number for number, name in enumerate(topic.show.classes)}
        kinds = dict(sorted(kinds.items(), key=lambda item: order[item[0]] if order else int(item[0])))
    return "class" if groups is None else "group", [_part(name, kinds[name], topic, when) for name in kinds]


def _part(name: str, members: list[int], topic: Topic, when: Timeline | None) -> content.Part:
    values = topic.mean[members]
    helpful, harmful = float(values.clamp(min=0).sum()), float(values.clamp(max=0).sum())
    growth = rounded(when.values[members].double().sum(0).cumsum(0).tolist()) if when else []
    return content.Part(name, len(members), digits(helpful), digits(harmful), growth)


def _checked(check: Check) -> content.Check:
    columns = (check.table.index.tolist(), *(check.table[name].tolist() for name in ("score", "truth", "sample")))
    points = [
        content.Point(i, digits(score), digits(true), name) for i, score, true, name in zip(*columns, strict=True)
    ]
    return content.Check(points, words.measures(check))


def _facts(topic: Topic) -> list[tuple[str, str]]:
    run, scores = topic.run, topic.scores
    facts = [("Run", run.path.name), ("Steps", f"{len(run):,}"), ("Parameters", f"{words.parameters(run):,}")]
    facts.append(("Groups" if topic.groups else "Examples scored", f"{len(scores.train_ids):,}"))
    if topic.asked is not None:
        facts.append(("Query loss at the end", f"{float(topic.asked.losses.mean()):.4g}"))
    facts.append(("Method", scores.method))
    facts.append(("Scoring took", f"{scores.cost.seconds:.1f} s, {scores.cost.hvps:,} Hessian-vector products"))
    return facts
