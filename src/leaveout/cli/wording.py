"""Errors in the words of the command line: the options that were typed, not the arguments behind them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

USAGE = frozenset(
    {
        "activation-unknown",
        "config-unreadable",
        "data-unknown",
        "groups-file-unreadable",
        "method-option-unknown",
        "method-option-wrong-kind",
        "method-unknown",
        "method-unreadable",
        "model-unknown",
        "optimizer-option-unknown",
        "optimizer-rejects-options",
        "optimizer-unknown",
        "run-not-found",
    }
)
"""Codes of errors that mean a mistyped command line: exit code 2, as for an option that does not exist."""

BEHIND = {"flip": "fraction"}
"""Options whose argument has another name."""


def in_options(message: str, options: Iterable[str]) -> str:
    """Write ``batch_size=0`` as ``--batch-size 0``, for the options that a command has.

    >>> in_options("batch_size=0 and rate=3; pass overwrite=True, or Task(seed=1).", ["--batch-size", "--seed"])
    '--batch-size 0 and rate=3; pass --again, or Task(seed=1).'
    """
    message = message.replace("overwrite=True", "--again")
    for option in options:
        name = option[2:].replace("-", "_")
        name = BEHIND.get(name, name)
        message = re.sub(rf"(?<![\w(-]){re.escape(name)}=(?=\S)", f"{option} ", message)
    return message


def naming(message: str, words: list[str]) -> str:
    """Put the option in front whose value the message quotes, where the message does not name it.

    >>> naming("there is no data set 'digts'.", ["train", "--data", "digts", "--epochs", "3"])
    "--data: there is no data set 'digts'."
    """
    for option, value in _typed(words):
        if (repr(value) in message or message.startswith(f"{value} ")) and option not in message:
            return f"{option}: {message}"
    return message


def _typed(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the options that were typed, with what came after them."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            yield option, value if equals else after
