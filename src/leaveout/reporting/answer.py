"""The top of a page: how many labels look wrong, what removing examples changes, how far to trust it."""

from __future__ import annotations

from collections.abc import Sequence

from leaveout.evaluate.curve import RANDOM, USUAL, Curve, chosen
from leaveout.evaluate.label_issues import Labels
from leaveout.reporting.content import Answer, Trust
from leaveout.scores import LABELS


def answers(
    labels: Labels | None, curve: Curve | None, method: str, harmful: int, total: int, trust: Trust, *, groups: bool
) -> list[Answer]:
    """Return the answers in the order in which one acts on them."""
    parts = []
    if labels is not None:
        parts.append(_labels(labels))
    parts.append(_removal(curve, method, harmful, total, None if labels is None else len(labels), groups=groups))
    parts.append(Answer("trust", trust.level, trust.headline, trust.brief or trust.sentence))
    return parts


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
    size = f"{curve.test_size:,} test examples"
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


def _removal(curve: Curve | None, method: str, harmful: int, total: int, wanted: int | None, *, groups: bool) -> Answer:
    what = "group" if groups else "example"
    if not harmful:
        return Answer(
            "removal", "good", f"No {what} did harm", f"By {method}, without any of {total:,} the loss would rise."
        )
    measured = [] if curve is None else [name for name in (LABELS, method) if name in curve.choices]
    if curve is None or not measured:
        words = f"{harmful:,} of {total:,} {what}s did harm by {method}. What removing them brings was not measured"
        words += "." if groups else ": study.cleanse(), or leaveout cleanse, retrains without them."
        return Answer("removal", "unchecked", f"{harmful:,} {what}{'' if harmful == 1 else 's'} did harm", words)
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
    sentences = [
        f"Retrained without {chosen(name, number)}: {curve.interval(name, number)} on {size}."
        for name, number in zip(measured, numbers, strict=True)
    ]
    tried = len(rows[rows["choice"] == measured[0]])
    more = [f"{tried} numbers were tried; all are below."] if tried > 1 else []
    return Answer("removal", level, headline, " ".join([*sentences, *more]))
