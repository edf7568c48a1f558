"""What notebooks show: small tables as HTML, and axes to plot on."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from leaveout._util.extras import needed_by

STYLE = "font-variant-numeric:tabular-nums;max-width:60rem"
CELL = "padding:.15rem .7rem;text-align:left;vertical-align:top"
HARM, HELP = "#d9622b", "#1d9488"
"""The colours for harm and help, as in the report."""


def card(title: str, words: Sequence[str] = (), heads: Sequence[str] = (), rows: Sequence[Sequence[Any]] = ()) -> str:
    """Write a title, sentences and a table as HTML; everything is escaped.

    >>> card("a < b", ["so"])
    '<div style="font-variant-numeric:tabular-nums;max-width:60rem"><strong>a &lt; b</strong><p>so</p></div>'
    """
    parts = [f"<strong>{escape(title)}</strong>", *(f"<p>{escape(sentence)}</p>" for sentence in words if sentence)]
    if rows:
        head = "".join(f'<th style="{CELL}">{escape(str(name))}</th>' for name in heads)
        lines = ["".join(f'<td style="{CELL}">{escape(_cell(cell))}</td>' for cell in row) for row in rows]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    return f'<div style="{STYLE}">{"".join(parts)}</div>'


def axes(given: Any = None, size: tuple[float, float] = (6.4, 4.0)) -> Any:
    """Return the given axes, or new ones; matplotlib is imported only here."""
    if given is not None:
        return given
    with needed_by("plot()"):
        from matplotlib import pyplot
    return pyplot.subplots(figsize=size, layout="constrained")[1]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
