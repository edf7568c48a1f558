"""Errors: each says in one sentence what is wrong and what to do.

Each has a ``code``, a short name of its cause that stays when the sentence is reworded; docs/errors.md lists them.
"""

import difflib
import operator
from collections.abc import Iterable
from typing import Any


class LeaveoutError(Exception):
    """The base of every error that leaveout raises on purpose; ``code`` names its cause.

    >>> error = InputError("ids is empty: name at least one example.", code="ids-empty")
    >>> str(error), error.code
    ('ids is empty: name at least one example.', 'ids-empty')
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message.encode("utf-8", "backslashreplace").decode())  # so that it can be printed
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the code when the error is pickled for another process."""
        return _rebuilt, (type(self), str(self), self.code), self.__dict__


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
    """Something that does not stop the work, but that the user should know."""


def _rebuilt(kind: type[LeaveoutError], message: str, code: str) -> LeaveoutError:
    return kind(message, code=code)


def closest(word: str, among: Iterable[str]) -> str:
    """Suggest a similar name in brackets for one that does not exist; return an empty string if there is none.

    >>> closest("batchsize", ["batch_size", "epochs"])
    ' (did you mean batch_size?)'
    """
    near = difflib.get_close_matches(word, list(among), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def kind_of(value: Any) -> str:
    """Name the type of a value with its article.

    >>> kind_of(1.5), kind_of(3), kind_of(type("SGD", (), {})())
    ('a float', 'an int', 'an SGD')
    """
    name = type(value).__name__
    spelled = len(name) > 1 and name.isupper()  # SGD is read letter by letter
    return f"{'an' if name[0].upper() in ('AEFHILMNORSX' if spelled else 'AEIOU') else 'a'} {name}"


def first_line(error: Exception) -> str:
    r"""Return an error's type, and the first line of its message.

    >>> first_line(ValueError("no such thing\nat all"))
    'ValueError: no such thing'
    """
    return f"{type(error).__name__}: {error}".splitlines()[0]


def is_whole(value: Any, low: int, high: int | None = None) -> bool:
    """Say whether a value is a whole number in this range; those of numpy and PyTorch count, True does not.

    >>> is_whole(3, 1), is_whole(0, 1), is_whole(1.5, 1), is_whole(True, 1)
    (True, False, False, False)
    """
    try:
        number = operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool) and low <= number and (high is None or number <= high)


def check_seed(seed: Any, low: int = -(2**63), high: int = 2**64 - 1) -> int:
    """Return the seed, or refuse it if it is not a whole number within the bounds; by default those of PyTorch."""
    if not is_whole(seed, low, high):
        raise InputError(f"seed={seed!r} must be a whole number from {low} to {high}.", code="seed-not-a-number")
    return operator.index(seed)
