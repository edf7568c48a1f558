"""Thin commands over the library: a file each, which joins ``app`` when it is imported."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from leaveout.cli.app import app, complaints
from leaveout.errors import LeaveoutError

__all__ = ["app", "entry"]

WAY = ("demo", "train", "score", "verify", "cleanse", "report", "show", "plan")
"""The commands of everyday work, in the order in which they are used; the others come after them."""

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def _name(command: object) -> str:
    return command.name or command.callback.__name__  # type: ignore[attr-defined]


app.registered_commands.sort(key=lambda command: (*WAY, _name(command)).index(_name(command)))
for _command in app.registered_commands:
    _command.rich_help_panel = "The way through" if _name(_command) in WAY else "Data and measurements"
for _group in app.registered_groups:
    _group.rich_help_panel = "Data and measurements"


def entry() -> None:
    """The command line; what leaveout refuses ends in its one sentence, not in a traceback."""
    try:
        app()
    except LeaveoutError as error:
        complaints.print(str(error), style="red", markup=False, highlight=False, soft_wrap=not complaints.is_terminal)
        raise SystemExit(1) from None
