"""Errors in the words of the command line: the options that were typed, not the arguments behind them."""

from __future__ import annotations

import re

USAGE = frozenset(
    {
        "activation-unknown",
        "data-unknown",
        "method-option-unknown",
        "method-option-wrong-kind",
        "method-unknown",
        "method-unreadable",
        "model-unknown",
        "optimizer-unknown",
    }
)
"""Codes of errors that mean a mistyped command line: exit code 2, as for an option that does not exist."""

BEHIND = {"flip": "fraction"}
"""Options whose argument has another name."""


def in_options(message: str, words: list[str]) -> str:
    """Write ``batch_size=0`` as ``--batch-size 0`` where that option is among the words that were typed.

    >>> in_options("batch_size=0 and seed=3; pass overwrite=True.", ["train", "--batch-size", "0"])
    '--batch-size 0 and seed=3; pass --again.'
    """
    message = message.replace("overwrite=True", "--again")
    for option in {word.split("=")[0] for word in words if word.startswith("--")}:
        name = option[2:].replace("-", "_")
        name = BEHIND.get(name, name)
        message = re.sub(rf"(?<![\w-]){re.escape(name)}=(?=\S)", f"{option} ", message)
    return message
