"""Runs the command line: ``python -m leaveout`` is ``leaveout``."""

from leaveout.cli import entry

if __name__ == "__main__":
    entry()
