"""Runs the command line: ``python -m leaveout`` is ``leaveout``."""

from leaveout._util.extras import needed_by
from leaveout.errors import UnsupportedError


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
        with needed_by("This command"):
            from leaveout.cli import entry

            entry()
    except UnsupportedError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
