"""The command line: one file per command, loaded when that command is called."""

from __future__ import annotations

import sys

from leaveout.cli.app import complaints
from leaveout.cli.commands import app
from leaveout.cli.wording import USAGE, in_options
from leaveout.errors import LeaveoutError

__all__ = ["app", "entry"]


def entry() -> None:
    """Run the command line; what leaveout refuses ends in its one sentence, not in a traceback."""
    try:
        app()
    except LeaveoutError as error:
        message = in_options(str(error), sys.argv[1:])
        complaints.print(message, style="red", markup=False, highlight=False, soft_wrap=not complaints.is_terminal)
        raise SystemExit(2 if error.code in USAGE else 1) from None
