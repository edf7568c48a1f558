"""What leaveout refuses, and why: every error says in one sentence what is wrong and what to do."""

import difflib
from collections.abc import Iterable


class LeaveoutError(Exception):
    """The base of every error that leaveout raises on purpose."""


class InputError(LeaveoutError, ValueError):
    """An argument cannot be used as it was given."""


class UnsupportedError(LeaveoutError):
    """A model or optimizer that cannot be handled exactly."""


class RunError(LeaveoutError):
    """A run directory is missing, incomplete, taken or damaged."""


class MismatchError(LeaveoutError):
    """Data or task differ from what the run was trained with."""


class EngineError(LeaveoutError):
    """Work that was given to other processes did not come back."""


class LeaveoutWarning(UserWarning):
    """Something that does not stop the work, but that its user should know."""


def closest(word: str, among: Iterable[str]) -> str:
    """A suggestion in brackets for a name that does not exist, or nothing.

    >>> closest("batchsize", ["batch_size", "epochs"])
    ' (did you mean batch_size?)'
    """
    near = difflib.get_close_matches(word, list(among), 1)
    return f" (did you mean {near[0]}?)" if near else ""
