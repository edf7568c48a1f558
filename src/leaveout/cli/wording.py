"""Errors in terms of the command line: the options that were typed, not the arguments behind them."""

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
"""Options whose Python argument has another name."""


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


def in_commands(sentence: str) -> str:
    """Replace functions by the commands that do the same.

    >>> in_commands("take another method (lo.choose), or refine (lo.refine)")
    'take another method (leaveout score), or refine (leaveout refine)'
    >>> in_commands("budget=300 for all.")
    '--budget 300 for all.'
    """
    return in_options(sentence, ["--budget"]).replace("lo.choose", "leaveout score").replace("lo.", "leaveout ")


def naming(message: str, words: list[str]) -> str:
    """Prepend the option whose value the message quotes, if the message does not name it.

    >>> naming("there is no data set 'digts'.", ["train", "--data", "digts", "--epochs", "3"])
    "--data: there is no data set 'digts'."
    """
    reason = message.partition("}: ")[2]  # PyTorch's reason
    for option, value in typed(words):
        name = option[2:].replace("-", "_")
        quoted = repr(value) in message or message.startswith(f"{value} ") or re.search(rf"\b{name}\b", reason)
        if quoted and option not in message:
            return f"{option}: {message}"
    return message


def typed(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the options that were typed, with their values."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            yield option, value if equals else after
