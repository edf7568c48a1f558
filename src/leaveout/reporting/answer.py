"""The first words of a page: how many labels look wrong, what removing examples brings, how far to trust it."""

from __future__ import annotations

from leaveout.evaluate.curve import RANDOM, Curve
from leaveout.evaluate.labels import Labels
from leaveout.reporting.content import Answer, Trust


def answers(
    labels: Labels | None, curve: Curve | None, method: str, harmful: int, total: int, trust: Trust, *, groups: bool
) -> list[Answer]:
    """The answers in the order in which one acts on them."""
    parts = []
    if labels is not None:
        parts.append(_labels(labels))
    parts.append(_removal(curve, method, harmful, total, None if labels is None else len(labels), groups=groups))
    parts.append(Answer("trust", trust.level, trust.headline, trust.sentence))
    return parts


def amount(curve: Curve, method: str, wanted: int | None) -> int:
    """The number removed that the page speaks of, chosen without looking at what it brought.

    It is the one nearest to the number of labels that look wrong, or the middle one.
    """
    amounts = sorted(int(m) for m in curve.table[curve.table["choice"] == method]["removed"].unique())
    if wanted is None:
        return amounts[len(amounts) // 2]
    return min(amounts, key=lambda removed: (abs(removed - wanted), removed))


def removal(curve: Curve, method: str, removed: int) -> str:
    """What removing this many brought, beside as many at random."""
    size = f"{curve.test_size:,} test examples"
    words = f"Retrained without the {removed:,} most harmful examples by {method}, the test {curve.measure} on {size} "
    words += f"{curve.change(method, removed)}."
    control = curve.table[(curve.table["choice"] == RANDOM) & (curve.table["removed"] == removed)]
    if len(control):
        words += f" Without as many drawn at random it {curve.change(RANDOM, removed)}."
    return words


def _labels(labels: Labels) -> Answer:
    count, total = len(labels), len(labels.table)
    words = f"Of {total:,} training labels"
    if not count:
        return Answer("labels", "good", "No label looks wrong", f"{words}. {labels.advice}".rstrip())
    changes = ", ".join(labels.changes(3)).removesuffix("...") + ("and others" if len(labels.changes()) > 3 else "")
    more = f"{words}; given → suggested {changes}. {labels.advice}".rstrip()
    return Answer("labels", "hint", f"{count:,} {'label looks' if count == 1 else 'labels look'} wrong", more)


def _removal(curve: Curve | None, method: str, harmful: int, total: int, wanted: int | None, *, groups: bool) -> Answer:
    what = "groups" if groups else "examples"
    did = f"{harmful:,} of {total:,} {what} did harm by {method}."
    if curve is None or method not in curve.choices:
        words = f"{did} What removing them brings was not measured"
        words += "." if groups else ": lo.cleanse, or leaveout cleanse, retrains without them."
        return Answer("removal", "unchecked", f"{harmful:,} {what} did harm", words)
    removed = amount(curve, method, wanted)
    rows = curve.changes()
    row = rows[(rows["choice"] == method) & (rows["removed"] == removed)].iloc[0]
    change = float(row[curve.measure])
    if not row["measurable"]:
        headline, level = f"Removing {removed:,}: no measurable change", "unchecked"
    else:
        by = f"{abs(change) * 100:.1f} points" if curve.measure == "error" else f"{abs(change):.3g}"
        headline = f"Removing {removed:,}: test {curve.measure} {'falls' if change < 0 else 'rises'} by {by}"
        level = "good" if change < 0 else "none"
    tried = len(rows[rows["choice"] == method])
    more = f" {tried} numbers were tried; all are below." if tried > 1 else ""
    return Answer("removal", level, headline, removal(curve, method, removed) + more)
