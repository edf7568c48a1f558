"""What keeps a run from being scored, said when it is first seen: as a warning, or as an error that stops training."""

from __future__ import annotations

import warnings

from leaveout.errors import InputError, LeaveoutError, LeaveoutWarning

HOW = ("warn", "stop")


class Problems:
    """The problems of one recording, each said once, and once more when it is finished.

    Args:
        how: ``"warn"`` or ``"stop"``.
    """

    def __init__(self, how: str) -> None:
        if how not in HOW:
            raise InputError(f"on_problem={how!r} is unknown: use 'warn' or 'stop'.", code="on-problem-unknown")
        self._stops = how == "stop"
        self._said: set[str] = set()
        self._lasting: list[LeaveoutError] = []

    def say(self, problem: LeaveoutError | None, *, lasting: bool = True) -> None:
        """Warn of a problem, or raise it; one that was said already, or None, is passed over.

        A ``lasting`` one keeps the whole run from being scored, or from being complete.
        """
        if problem is None or str(problem) in self._said:
            return
        self._said.add(str(problem))
        self._lasting += [problem] if lasting else []
        if self._stops:
            raise problem
        warnings.warn(f"{problem} (Training goes on; on_problem='stop' stops it.)", LeaveoutWarning, stacklevel=2)

    def remind(self) -> None:
        """Repeat the first lasting problem at the end of the training: its warning may have scrolled away."""
        if self._lasting and not self._stops:
            warnings.warn(f"As was said while it was recorded: {self._lasting[0]}", LeaveoutWarning, stacklevel=3)
