"""The published figures, for comparison with ours.

``paper.csv`` holds both big tables of "Accumulative SGD Influence Estimation" (its tables of the non-convex and of the
strongly convex regime): mean and standard deviation over 20 runs, as printed there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd


@cache
def figures() -> pd.DataFrame:
    """Return a row for each experiment, data set, noise and method: the metrics, each with its ``_std``."""
    return pd.read_csv(Path(__file__).with_name("paper.csv"))


def figure(experiment: str, data: str, noise: str, level: float, method: str) -> pd.Series:
    """Return one row of the published tables.

    >>> float(figure("convex", "adult", "clean", 0.0, "ACC-SGD-IE")["kendall"])
    0.9774
    """
    table = figures()
    keys = {"experiment": experiment, "data": data, "noise": noise, "level": level, "method": method}
    for name, value in keys.items():
        table = table[table[name] == value]
    return table.iloc[0]
