"""Thin commands over the library: a file each."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from leaveout.cli import bench, data, demo, load, plan, report, reproduce, score, train, verify
from leaveout.cli.app import app
from leaveout.errors import LeaveoutError

__all__ = ["app", "bench", "data", "demo", "entry", "load", "plan", "report", "reproduce", "score", "train", "verify"]


def entry() -> None:
    """The command line; what leaveout refuses ends in its one sentence, not in a traceback."""
    try:
        app()
    except LeaveoutError as error:
        Console(stderr=True).print(f"[red]{escape(str(error))}[/red]")
        raise SystemExit(1) from None
