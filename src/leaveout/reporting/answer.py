"""The top of a page: how many labels look wrong, what removing examples changes, how far to trust it."""

from __future__ import annotations

from collections.abc import Sequence

from leaveout.evaluate.curve import RANDOM, USUAL, Curve, chosen
from leaveout.evaluate.label_issues import Labels
from leaveout.reporting.content import Answer, Trust
from leaveout.scores import LABELS


def answers(
    labels: Labels | None,
    curve: Curve | None,
    method: str,
    trust: Trust,
    values: Sequence[float],
    *,
    failed: str = "",
    groups: bool,
) -> list[Answer]:
    """Return the answers in the order in which one acts on them; ``values`` are the scores of ``method``."""
    parts = [] if labels is None else [_labels(labels)]
    if parts and failed:
        words = "A model that has learned nothing finds nearly every label wrong."
        parts = [Answer("labels", "none", "The labels cannot be judged", words)]
    parts.append(_removal(curve, method, trust, values, None if labels is None else len(labels), groups=groups))
    words = f"{trust.brief} {trust.instead}".rstrip()
    return [*parts, Answer("trust", trust.level, trust.headline, words)]


def amount(curve: Curve, method: str, wanted: int | None) -> int:
    """Return the number removed that the page reports, chosen without looking at the result.

    It is the one nearest to the number of labels that look wrong, or the middle one.
    """
    amounts = sorted(int(m) for m in curve.table[curve.table["choice"] == method]["removed"].unique())
    if wanted is None:
        return amounts[len(amounts) // 2]
    return min(amounts, key=lambda removed: (abs(removed - wanted), removed))


def removals(curve: Curve, choices: Sequence[tuple[str, int]]) -> str:
    """Say what each of these removals changed; a control of as many at random is named once."""
    last = {removed: method for method, removed in choices}
    return " ".join(removal(curve, method, n, control=last[n] == method) for method, n in choices)


def removal(curve: Curve, method: str, removed: int, *, control: bool = True) -> str:
    """Say what removing this many changed, compared with as many at random."""
    size = f"{curve.test_size:,} test examples" + (f" that are no test: they are {curve.seen}" if curve.seen else "")
    words = f"Retrained without {chosen(method, removed)}, the test {curve.measure} on {size} "
    words += f"{curve.change(method, removed)}."
    drawn = curve.table[(curve.table["choice"] == RANDOM) & (curve.table["removed"] == removed)]
    if control and len(drawn):
        words += f" Without as many drawn at random it {curve.change(RANDOM, removed)}."
    return words


def _labels(labels: Labels) -> Answer:
    count, total = len(labels), len(labels.table)
    if not count:
        words = f"All {total:,} training labels were looked at. {labels.advice}".rstrip()
        return Answer("labels", "good", "No label looks wrong", words)
    changes = ", ".join(labels.changes(3)).removesuffix(", ...")
    more = f"Of {total:,} training labels; given → suggested, most often: {changes}. {labels.advice}".rstrip()
    headline = f"{count:,} {'label looks' if count == 1 else 'labels look'} wrong"
    return Answer("labels", "hint", headline + (" to a weak model" if labels.doubtful else ""), more)


def _removal(
    curve: Curve | None, method: str, trust: Trust, values: Sequence[float], wanted: int | None, *, groups: bool
) -> Answer:
    what, total, harmful = "group" if groups else "example", len(values), sum(value < 0 for value in values)
    measured = [] if curve is None else [name for name in (LABELS, method) if name in curve.choices]
    if curve is None or not measured:
        if not any(values):
            words = f"By {method}, leaving out any of {total:,} changes nothing."
            return Answer("removal", "none", f"No {what} had any effect", words)
        if trust.instead:
            return Answer("removal", trust.level, f"Which {what}s did harm cannot be told from this", trust.instead)
        if not harmful:
            words = f"By {method}, without any of {total:,} the loss would rise."
            return Answer("removal", trust.level, f"No {what} did harm", words)
        did = "did harm" if trust.level == "exact" else f"{'has' if harmful == 1 else 'have'} a score below zero"
        words = f"Of {total:,}, by {method}. What removing them brings was not measured"
        words += "." if groups else ": study.cleanse(), or leaveout cleanse, retrains without them."
        return Answer("removal", "unchecked", f"{harmful:,} {what}{'s' * (harmful > 1)} {did}", words)
    rows = curve.changes()
    numbers = [amount(curve, name, wanted) for name in measured]
    row = rows[(rows["choice"] == measured[0]) & (rows["removed"] == numbers[0])].iloc[0]
    change = float(row[curve.measure])
    what = "suspicious label" if measured[0] == LABELS else "harmful example"
    start = f"Without the {numbers[0]:,} most {what}s" if numbers[0] > 1 else f"Without the most {what}"
    if not row["measurable"]:
        headline, level = f"{start}: no measurable change", "unchecked"
    else:
        by = f"{abs(change) * 100:.1f} points" if curve.measure == "error" else f"{abs(change):.3g}"
        headline = f"{start}: test {curve.measure} {'falls' if change < 0 else 'rises'} by {by}"
        level = "good" if change < 0 else "none"
        if row["usual"]:
            headline, level = f"{headline}, {USUAL}", "unchecked"
    size = f"{curve.test_size:,} test examples"
    if curve.seen:
        level, size = "unchecked", f"{size} that are no test: they are {curve.seen}"
    sentences = [
        f"Retrained without {chosen(name, number)}: {curve.interval(name, number)} on {size}."
        for name, number in zip(measured, numbers, strict=True)
    ]
    tried = len(rows[rows["choice"] == measured[0]])
    more = [f"{tried} numbers were tried; all are below."] if tried > 1 else []
    return Answer("removal", level, headline, " ".join([*sentences, *more]))
