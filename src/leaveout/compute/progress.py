"""Progress bars: one at a time, shown only if work takes longer than a moment."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from importlib.util import find_spec
from typing import Any, TypeVar

from leaveout._util.extras import needed_by
from leaveout._util.generators import undisturbed

T = TypeVar("T")

MOMENT = 1.0
"""Seconds that work may take without a bar."""
REDRAWN = 0.25
"""Seconds between two updates of a notebook's bar."""

_SHOWING: list[str] = []
"""The description of the visible bar: nested work does not show another one."""


_PART: list[tuple[int, int]] = []
"""The number of the current part and the number of parts: the bar and its remaining time cover them all."""


@contextmanager
def part(number: int, count: int) -> Iterator[None]:
    """Mark what is tracked in this context as part ``number`` (from 0) of ``count`` equal parts."""
    _PART.append((number, count))
    try:
        yield
    finally:
        _PART.pop()


def track(items: Iterable[T], total: int, what: str, visible: bool | None) -> Iterator[T]:
    """Yield the items, with a bar that shows the progress and the remaining time, one bar at a time.

    ``visible=None`` shows it on a terminal, if rich is installed, and in a notebook, and nowhere else.
    """
    if _SHOWING or visible is False:
        return iter(items)
    if in_notebook():
        return _in_cell(items, total, what)
    if visible is None and find_spec("rich") is None:
        return iter(items)
    with undisturbed(), needed_by("A progress bar"):  # rich draws from Python's generator when it is imported
        from rich.console import Console

        console = Console(stderr=True)
    return _shown(items, total, what, console) if visible or console.is_terminal else iter(items)


def in_notebook() -> bool:
    """Say whether a Jupyter kernel runs this code."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _bar_of(console: Any) -> Any:
    """Return rich's bar, with a column for steps per second, or seconds per step."""
    from rich import progress
    from rich.text import Text

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            speed = task.finished_speed or task.speed
            if not speed:
                return Text("")
            return Text(f"{speed:,.0f}/s" if speed >= 10 else f"{1 / speed:,.2g} s each")

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        Rate(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
    )
    return progress.Progress(*columns, console=console, transient=console.is_terminal)


def _shown(items: Iterable[T], total: int, what: str, console: Any) -> Iterator[T]:
    """Yield the items, with a bar as soon as they take longer than a moment; it disappears when they are done."""
    number, count = _PART[-1] if _PART else (0, 1)
    with undisturbed():
        bar = _bar_of(console)
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


def _in_cell(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield the items, with one bar below the cell that is updated in place and disappears when they are done.

    It is plain HTML, so that it needs no widgets, and a saved notebook does not contain it.
    """
    from IPython.display import HTML, display

    number, count = _PART[-1] if _PART else (0, 1)
    began = time.monotonic()
    drawn = began + MOMENT - REDRAWN
    handle: Any = None
    _SHOWING.append(what)
    try:
        for done, item in enumerate(items):
            now = time.monotonic()
            if now - drawn >= REDRAWN:
                bar = HTML(_bar(what, number * total + done, count * total, done, now - began))
                if handle is None:
                    handle = display(bar, display_id=True)
                else:
                    handle.update(bar)
                drawn = now
            yield item
    finally:
        if handle is not None:
            handle.update(HTML(""))
        _SHOWING.remove(what)


def _bar(what: str, done: int, total: int, here: int, seconds: float) -> str:
    """Write a bar as HTML; ``here`` of the items took the ``seconds``.

    >>> _bar("replaying", 30, 120, 30, 10)
    'replaying <progress value="30" max="120"></progress> 30/120, 10 s, 30 s left'
    """
    left = f", {seconds / here * (total - done):.0f} s left" if here else ""
    return f'{escape(what)} <progress value="{done}" max="{total}"></progress> {done}/{total}, {seconds:.0f} s{left}'
