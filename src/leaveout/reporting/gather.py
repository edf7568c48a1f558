"""From a run, its scores and its data to the plain content of a report."""

from __future__ import annotations

from datetime import date

from torch import Tensor

from leaveout.estimators.timeline import Timeline
from leaveout.evaluate.check import Check
from leaveout.evaluate.curve import Curve
from leaveout.reporting import content, rows, words
from leaveout.reporting.answer import answers
from leaveout.reporting.cleansing import cleansing
from leaveout.reporting.content import digits, rounded
from leaveout.reporting.topic import Topic, membership
from leaveout.reporting.trust import trusted
from leaveout.scores import UNIT, Scores

PARTS = 50
MOST_REPLAYED = 200
"""The most replayed examples that are shown with what they look like."""


def gather(topic: Topic, curve: Curve | None) -> content.Content:
    """Return everything that the page says."""
    scores, show, mean = topic.scores, topic.show, topic.mean
    for one in topic.methods:
        if one.method in topic.checks:
            topic.checks[one.method].check_same_scores(one)
    when, notes, by_query = topic.when, list(topic.notes), topic.by_query
    columns = rows.chosen_queries(topic)
    drivers = {column: rows.drivers(by_query.values[:, column]) for column in columns if by_query is not None}
    suspects = [] if topic.failed else rows.suspects(topic)
    listed = rows.listed(mean, {row for pairs in drivers.values() for row, _ in pairs} | set(suspects))
    place = {row: i for i, row in enumerate(listed)}
    # In order of importance: labels that look wrong, the extremes of the mean, then the drivers of each query.
    first = [place[row] for row in suspects[: show.top]] + rows.ends(len(listed), show.top)
    replayed = [i for i, row in enumerate(listed) if scores.train_ids[row] in topic.truths]
    driving = [place[row] for pairs in drivers.values() for row, _ in pairs]
    places = list(dict.fromkeys([*first, *driving, *replayed[:MOST_REPLAYED]]))
    shown, asked, whole = rows.looks(topic, listed, places, columns)
    if not whole:
        notes.append(f"Pictures beyond {rows.PICTURE_BYTES // 10**6} MB were left out.")
    if len(listed) < len(mean):
        notes.append(f"The {len(listed):,} most extreme of {len(mean):,} scores are listed; sums are over all scores.")
    table = rows.table(topic, listed)
    issues = None if topic.failed else rows.issues(topic, place, table.names)
    parts_of, kinds = _kinds(topic)
    methods = [_method(one, topic, listed, table, kinds, when) for one in topic.methods]
    wanted = None if topic.labels is None else len(topic.labels)
    top = answers(
        topic.labels, curve, scores.method, methods[0].trust, mean.tolist(), failed=topic.failed, groups=topic.groups
    )
    return content.Content(
        title=show.title or f"Training data influence: {topic.run.path.name}",
        made=date.today().isoformat(),
        key=f"{topic.run.fingerprint:08x}",
        groups=topic.groups,
        answers=top,
        summary=[words.trained(topic.run, topic.task), words.scored(scores, topic.queries, groups=topic.groups)],
        facts=_facts(topic),
        notes=notes,
        methods=methods,
        verdicts=words.verdicts(topic.methods, topic.checks),
        total=len(mean),
        table=table,
        issues=issues,
        shown=shown,
        called=_called(topic, listed),
        spans=list(when.spans) if when else [],
        timing=words.timing(when.values.double().sum(1).tolist(), mean.tolist(), scores.method) if when else "",
        lines={i: rounded(when.values[listed[i]].tolist()) for i in places} if when else {},
        queries=[rows.query_of(topic, column, drivers[column], place, asked) for column in columns],
        queries_by="" if by_query is None or by_query.method == scores.method else by_query.method,
        parts_of=parts_of,
        cleansing=cleansing(curve, scores.method, wanted) if curve else None,
    )


def _method(
    scores: Scores,
    topic: Topic,
    listed: list[int],
    table: content.Table,
    kinds: dict[str, list[int]],
    when: Timeline | None,
) -> content.Method:
    mean, exact = topic.column(scores)
    loss = scores.unit == UNIT
    check = topic.checks.get(scores.method)
    score, sure = rounded(mean[listed].tolist()), exact[listed].tolist()
    harmful = int((mean < 0).sum())
    trust = trusted(scores, check, topic.failed)
    said = {"groups": topic.groups, "loss": loss, "sure": trust.level == "exact"}
    return content.Method(
        name=scores.method,
        unit="" if loss else scores.unit,
        score=score,
        exact=sure,
        harmful=harmful,
        sentence=words.outcome(table, score, sure, len(mean), harmful, **said),
        trust=trust,
        histogram=rows.histogram(mean),
        parts=[_part(name, members, mean, when) for name, members in kinds.items()],
        check=_checked(check) if check and not scores.all_exact else None,
    )


def _called(topic: Topic, listed: list[int]) -> dict[int, str]:
    """Return the names of examples, if they have names."""
    ids = topic.show.ids
    if ids is None or topic.groups:
        return {}
    return {place: str(ids[int(topic.scores.train_ids[row])]) for place, row in enumerate(listed)}


def _kinds(topic: Topic) -> tuple[str, dict[str, list[int]]]:
    """Return the rows of each group if there are groups, otherwise of each class."""
    own, groups = topic.own, topic.show.groups
    kinds: dict[str, list[int]] = {}
    if topic.groups:
        return "", {}
    if groups is not None:
        at = {int(i): row for row, i in enumerate(topic.scores.train_ids)}
        members = membership(max(at) + 1 if topic.task is None else topic.task.size, groups)
        kinds = {name: [at[i] for i in ids if i in at] for name, ids in members.items()}
    elif own is not None and own.p is not None:  # labels are classes, not numbers
        for row, label in enumerate(own.labels):
            kinds.setdefault(label, []).append(row)
    if len(kinds) > PARTS or not kinds:
        return "", {}
    if groups is None:  # in the order of the classes
        order = {str(name): number for number, name in enumerate(topic.show.classes)}
        kinds = dict(sorted(kinds.items(), key=lambda item: order[item[0]] if order else int(item[0])))
    return "class" if groups is None else "group", kinds


def _part(name: str, members: list[int], mean: Tensor, when: Timeline | None) -> content.Part:
    values = mean[members]
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
    products = f", {scores.cost.hvps:,} Hessian-vector products" if scores.cost.hvps else ""
    facts.append(("Scoring took", f"{scores.cost.seconds:.1f} s{products}"))
    return facts
