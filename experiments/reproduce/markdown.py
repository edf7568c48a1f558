"""Markdown tables, and a mean with its standard deviation in few characters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: pd.Series | Sequence[float], small: bool = False) -> str:
    """Write mean (standard deviation); ``small`` is for values far below one.

    >>> spread([0.5, 0.7]), spread([1e-4, 3e-4], small=True), spread([0.25])
    ('0.600 (0.141)', '2.00e-4 (1.41e-4)', '0.250 (-)')
    """
    numbers = np.asarray(values, dtype=float)
    numbers = numbers[~np.isnan(numbers)]
    if not len(numbers):
        return "-"
    deviation = number(float(numbers.std(ddof=1)), small) if len(numbers) > 1 else "-"
    return f"{number(float(numbers.mean()), small)} ({deviation})"


def number(value: float, small: bool = False) -> str:
    """Write a number in few characters.

    >>> number(0.98765), number(0.00012345, small=True)
    ('0.988', '1.23e-4')
    """
    if not small:
        return f"{value:.3f}"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}e{int(exponent)}"
