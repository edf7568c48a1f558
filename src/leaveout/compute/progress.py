"""Progress bars: one at a time, shown only when work takes longer than a moment."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

T = TypeVar("T")

MOMENT = 1.0
"""Seconds that work may take without a bar."""

_SHOWING: list[str] = []
"""What the bar on the screen is about: work within other work shows none of its own."""


_PART: list[tuple[int, int]] = []
"""Which part of how many alike is under way: the bar and its time left cover them all."""


@contextmanager
def part(number: int, count: int) -> Iterator[None]:
    """Say that what is tracked within is part ``number`` (from 0) of ``count`` alike."""
    _PART.append((number, count))
    try:
        yield
    finally:
        _PART.pop()


def track(items: Iterable[T], total: int, what: str, visible: bool | None) -> Iterator[T]:
    """Yield the items, with a bar that shows rate and remaining time; ``visible=None`` shows it on a terminal only.

    Notebooks show it where ipywidgets is there, which rich draws with; without, they show nothing.
    """
    if in_notebook() and find_spec("ipywidgets") is None:
        return iter(items)
    console = Console() if in_notebook() else Console(stderr=True)
    visible = console.is_terminal or console.is_jupyter if visible is None else visible
    return _shown(items, total, what, console) if visible and not _SHOWING else iter(items)


def in_notebook() -> bool:
    """Say whether a Jupyter kernel runs this code, whose cells show bars that rich draws as HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class _Rate(ProgressColumn):
    """Steps per second, or seconds per step."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if not speed else f"{speed:,.0f}/s" if speed >= 10 else f"{1 / speed:,.2g} s each")


def _shown(items: Iterable[T], total: int, what: str, console: Console) -> Iterator[T]:
    """Yield the items, with a bar as soon as they take longer than a moment; it goes away when they are done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    number, count = _PART[-1] if _PART else (0, 1)
    bar = Progress(*columns, console=console, transient=console.is_terminal)
    task = bar.add_task(what, total=total * count, completed=total * number)
    timer = threading.Timer(MOMENT, bar.start)
    timer.daemon = True
    _SHOWING.append(what)
    timer.start()
    try:
        for item in items:
            yield item
            bar.advance(task)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
        _SHOWING.remove(what)
