"""The command line: one file per command, loaded when that command is called."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable
from typing import Any

from leaveout.cli.app import complaints
from leaveout.cli.commands import app, options
from leaveout.cli.wording import USAGE, in_options, naming, typed
from leaveout.errors import LeaveoutError, LeaveoutWarning

__all__ = ["app", "entry"]

_WITH_THEIR_PLACE = warnings.formatwarning


def entry(commands: Callable[[], object] = app) -> None:
    """Run the command line; an error of leaveout ends in its one sentence, not in a traceback.

    An error about something that was typed is a usage error, with exit code 2; any other has exit code 1.
    """
    warnings.formatwarning = plainly
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files, and texts of data, may not be valid UTF-8
    try:
        commands()
    except LeaveoutError as error:
        words, said = sys.argv[1:], str(error).replace("overwrite=True", "--again")
        message = said if "--config" in words else in_options(said, options(words[0] if words else ""))
        about = any(said.startswith(repr(value)) for _, value in typed(words))
        usage = about or message != said or error.code in USAGE
        if usage:
            message = naming(message, words)
        complaints.print(message, style="red", markup=False, highlight=False, soft_wrap=not complaints.is_terminal)
        raise SystemExit(2 if usage else 1) from None
    finally:
        warnings.formatwarning = _WITH_THEIR_PLACE


def plainly(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
    r"""Write a warning of leaveout as its sentence only, without the line of code that it comes from.

    >>> plainly("The disk is full.", LeaveoutWarning, "writer.py", 3)
    'The disk is full.\n'
    """
    if issubclass(category, LeaveoutWarning):
        return f"{message}\n"
    return _WITH_THEIR_PLACE(message, category, *place, **line)
