"""What leaveout refuses, and why: every error says in one sentence what is wrong and what to do."""

import difflib
import operator
from collections.abc import Iterable
from typing import Any


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


def is_whole(value: Any, low: int, high: int | None = None) -> bool:
    """Whether a value is a whole number in this range; those of numpy and PyTorch are as well, True is none.

    >>> is_whole(3, 1), is_whole(0, 1), is_whole(1.5, 1), is_whole(True, 1)
    (True, False, False, False)
    """
    try:
        found = operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool) and low <= found and (high is None or found <= high)


def check_seed(seed: Any, low: int = -(2**63), high: int = 2**64 - 1) -> int:
    """The seed, if it is one; without other bounds, one that PyTorch takes."""
    if not is_whole(seed, low, high):
        raise InputError(f"seed={seed!r} must be a whole number from {low} to {high}.")
    return operator.index(seed)
