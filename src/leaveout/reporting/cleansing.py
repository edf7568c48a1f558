"""The cleansing curve as the page shows it: a line for each way to choose what is removed, and a sentence."""

from __future__ import annotations

import numpy as np
import pandas as pd

from leaveout.errors import InputError
from leaveout.evaluate.curve import NOTHING, RANDOM, Curve
from leaveout.reporting.content import Cleansing, Line, digits, rounded


def cleansing(curve: Curve) -> Cleansing:
    """Describe the test error after retraining, or the loss where there is no error to count."""
    frame = curve.to_frame()
    measure = "loss" if frame["error"].isna().all() else "error"
    if not np.isfinite(frame[measure]).all():
        raise InputError(
            f"The curve has a test {measure} that is NaN or infinite: look at what was removed there, or leave the "
            "curve out.",
            code="values-not-finite",
        )
    base = frame[frame["choice"] == NOTHING].iloc[0]
    lines = []
    for choice, part in frame[frame["choice"] != NOTHING].groupby("choice", sort=False):
        name = "at random" if choice == RANDOM else f"most harmful by {choice}"
        ends = (f"{measure}_low", f"{measure}_high")
        x, y, low, high = (part.sort_values("removed")[key].astype(float) for key in ("removed", measure, *ends))
        finite = bool(np.isfinite([low, high]).all())  # a single test example has no standard error
        lines.append(
            Line(name, rounded(x), rounded(y), rounded(low) if finite else [], rounded(high) if finite else [])
        )
    sentence = _sentence(frame, base, measure, curve.test_size)
    return Cleansing(sentence, f"Test {measure}", digits(float(base[measure])), lines)


def _sentence(frame: pd.DataFrame, base: pd.Series, measure: str, size: int) -> str:
    """Say what removing brought at best, beside as many removed at random."""
    style = "{:.4g}" if measure == "loss" else "{:.2%}"
    start = style.format(base[measure])
    chosen = frame[~frame["choice"].isin([NOTHING, RANDOM])]
    best = chosen.sort_values(measure, kind="stable").iloc[0]
    what = f"the test {measure} on {size:,} examples"
    control = frame[(frame["choice"] == RANDOM) & (frame["removed"] == best["removed"])]
    beside = ""
    if len(control):
        beside = f"; with as many removed at random it is {style.format(control.iloc[0][measure])}"
    if best[measure] >= base[measure]:
        return f"Removing the most harmful examples did not lower {what}: it is {start} with all of them in{beside}."
    return (
        f"After retraining without the {best['removed']:,} most harmful examples by {best['choice']}, {what} falls "
        f"from {start} to {style.format(best[measure])}{beside}."
    )
