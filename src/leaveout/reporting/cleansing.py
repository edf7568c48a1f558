"""The cleansing curve as the page shows it: one line per way of choosing what is removed, and a sentence."""

from __future__ import annotations

import numpy as np

from leaveout.errors import InputError
from leaveout.evaluate.curve import NOTHING, RANDOM, Curve
from leaveout.reporting.answer import amount, removals
from leaveout.reporting.content import Cleansing, Line, digits, rounded
from leaveout.scores import LABELS


def cleansing(curve: Curve, method: str, wanted: int | None) -> Cleansing:
    """Return the test error after retraining, or the loss if there are no classes.

    The sentence is about ``method`` if it was measured, and the number removed that is nearest to ``wanted``.
    """
    frame, measure = curve.to_frame(), curve.measure
    if not np.isfinite(frame[measure]).all():
        raise InputError(
            f"The curve has a test {measure} that is NaN or infinite: look at what was removed there, or leave the "
            "curve out.",
            code="values-not-finite",
        )
    base = frame[frame["choice"] == NOTHING].iloc[0]
    lines = []
    for choice, part in frame[frame["choice"] != NOTHING].groupby("choice", sort=False):
        ends = (f"{measure}_low", f"{measure}_high")
        x, y, low, high = (part.sort_values("removed")[key].astype(float) for key in ("removed", measure, *ends))
        finite = bool(np.isfinite([low, high]).all())  # a single test example has no standard error
        band = [rounded(end) if finite else [] for end in (low, high)]
        lines.append(Line(_name(str(choice)), rounded(x), rounded(y), *band))
    changes = [
        (_name(str(row["choice"])), int(row["removed"]), curve.change(str(row["choice"]), int(row["removed"])))
        for _, row in curve.changes().iterrows()
    ]
    measured = [name for name in (LABELS, method) if name in curve.choices]
    if measured:
        sentence = removals(curve, [(name, amount(curve, name, wanted)) for name in measured])
    else:
        names = " and ".join(curve.choices)
        sentence = f"Removed by {names}; nothing was removed by {method}, whose scores are shown above."
    return Cleansing(sentence, f"Test {measure}", digits(float(base[measure])), lines, changes)


def _name(choice: str) -> str:
    names = {RANDOM: "at random", LABELS: "labels that look wrong"}
    return names.get(choice, f"most harmful by {choice}")
