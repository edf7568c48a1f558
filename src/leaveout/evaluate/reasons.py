"""Why a label looks wrong, in a few words."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Bool, Int
from torch import Tensor

from leaveout.evaluate.dynamics import Dynamics
from leaveout.task.classes import class_names


def reasons(
    history: Dynamics,
    issue: Bool[Tensor, " n"],
    suggested: Int[Tensor, " n"],
    other: dict[int, int],
    classes: Sequence[str],
    epochs: int,
) -> list[str]:
    """Return a phrase for each example that is an issue or conflicts with another, and an empty one for the rest.

    Args:
        history: how the run treated the examples.
        issue: which labels look wrong.
        suggested: the label that each example looks like.
        other: for an example, one with the same input and another label.
        classes: names of the classes.
        epochs: the number of epochs of the run.
    """
    given, likely = class_names(history.labels, classes), class_names(suggested, classes)
    words = [""] * len(given)
    for number in {*issue.nonzero().flatten().tolist(), *other}:
        if number in other:
            words[number] = f"same input as {other[number]}, which is labelled {given[other[number]]}"
        else:
            times = int((history.predicted[:, number] == suggested[number]).sum())
            words[number] = "held out, " if history.folds else ""
            words[number] += _treatment(history, number, given[number], likely[number], times, epochs)
    return words


def _treatment(history: Dynamics, number: int, given: str, name: str, times: int, epochs: int) -> str:
    """Say how the run treated one example that looks like another class, which ``times`` states predicted."""
    states, fitted = len(history.steps), history.fitted[:, number]
    otherwise = int((~fitted).sum())
    learned, forgotten = int(history.learned[number]), int(history.forgotten[number])
    mostly = "mostly" if 2 * times > otherwise else "on average most likely"
    if not otherwise:
        return f"always predicted {given}, but never with confidence"
    if times == states:
        return f"always predicted {name}"
    if otherwise == states:
        return f"never predicted {given}, {mostly} {name}"
    if learned == states and times:
        return f"predicted {name} at {times} of {states} states"
    if learned == states or forgotten > 1:
        alone = f" for {name}" if times == otherwise else f", {mostly} {name}"
        return f"forgotten {forgotten} times{alone}" if forgotten > 1 else f"not learned, {mostly} {name}"
    if learned >= states / 2:
        return f"learned late, in epoch {history.epochs[learned] + 1} of {epochs}; before that {mostly} {name}"
    return f"at first {mostly} {name}"
