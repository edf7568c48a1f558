"""Progress bars: one at a time, shown only when work takes longer than a moment."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
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


def track(items: Iterable[T], total: int, what: str, visible: bool | None) -> Iterator[T]:
    """Yield the items, with a bar that shows rate and remaining time; ``visible=None`` shows it on a terminal only."""
    console = Console(stderr=True)
    visible = console.is_terminal if visible is None else visible
    return _shown(items, total, what, console) if visible and not _SHOWING else iter(items)


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
    bar = Progress(*columns, console=console, transient=console.is_terminal)
    task = bar.add_task(what, total=total)
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
