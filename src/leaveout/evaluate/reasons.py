"""Why a label looks wrong, in a few words."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Bool
from torch import Tensor

from leaveout.evaluate.dynamics import Dynamics
from leaveout.task.classes import class_names


def reasons(
    history: Dynamics, issue: Bool[Tensor, " n"], other: dict[int, int], classes: Sequence[str], epochs: int
) -> list[str]:
    """Give a phrase for each example that is an issue or conflicts with another, and nothing for the rest.

    Args:
        history: how the run treated the examples.
        issue: which labels look wrong.
        other: for an example, one with the same input and another label.
        classes: names of the classes.
        epochs: how many the run has.
    """
    given = class_names(history.labels, classes)
    words = [""] * len(given)
    for number in {*issue.nonzero().flatten().tolist(), *other}:
        words[number] = (
            f"same input as {other[number]}, which is labelled {given[other[number]]}"
            if number in other
            else _treatment(history, number, classes, epochs)
        )
    return words


def _treatment(history: Dynamics, number: int, classes: Sequence[str], epochs: int) -> str:
    """Say how the run treated one example."""
    fitted, states = history.fitted[:, number], len(history.steps)
    given = class_names(history.labels[number : number + 1], classes)[0]
    otherwise = history.predicted[:, number][~fitted]
    if not len(otherwise):
        return f"always predicted {given}, but never with confidence"
    common = otherwise.mode().values[None]
    name, times = class_names(common, classes)[0], int((otherwise == common).sum())
    learned, forgotten = int(history.learned[number]), int(history.forgotten[number])
    if times == states:
        return f"always predicted {name}"
    if learned == states:
        never = len(otherwise) == states
        return f"never predicted {given}, mostly {name}" if never else f"predicted {name} at {times} of {states} states"
    if forgotten > 1:
        return f"forgotten {forgotten} times for {name}" if times == len(otherwise) else f"forgotten {forgotten} times"
    if learned >= states / 2:
        return f"learned late, in epoch {history.epochs[learned] + 1} of {epochs}; before that mostly {name}"
    return f"predicted {name} at first"
