"""What a recording says when it cannot go on."""

from __future__ import annotations

from pathlib import Path

from leaveout.errors import RunError, UnsupportedError


def last_state_lost(step: int) -> RunError:
    """The weights after the last step were overwritten before they were kept."""
    return RunError(
        f"The parameters were changed after step {step} and before finish(), so that the state it led to is gone: call "
        "finish() before other weights are put into the model, or record with keep='all'. "
        "open_run(path, partial=True) reads the run up to the last state that is on disk.",
        code="last-state-lost",
    )


def parameters_changed(where: str, before: int) -> UnsupportedError:
    """Something wrote to the parameters between two steps."""
    return UnsupportedError(
        f"{where}, the parameters are not those that step {before} left: something other than optimizer.step() wrote "
        "to them (weights loaded, clamped, averaged or reset), which cannot be replayed. Leave them alone between "
        "steps, or finish() here and record what follows as another run.",
        code="parameters-changed",
    )


def not_finite(step: int, name: str, ids: list[int], bad: list[int]) -> RunError:
    """A step made a parameter NaN or infinite; ``bad`` are examples of its batch that are so themselves."""
    blame = (
        f"example {bad[0]} of its batch holds NaN or infinite values; repair or leave out that example"
        if bad
        else f"lower the learning rate or look at the losses of its batch's examples {ids[:8]}"
    )
    return RunError(
        f"Step {step} made parameter {name!r} NaN or infinite: {blame}; the steps before it are kept.",
        code="step-not-finite",
    )


def disk_full(path: Path, error: OSError, steps: int) -> str:
    """The disk takes no more: what is there, and how to go on."""
    there = "nothing is on disk yet" if steps == 0 else "open_run(path, partial=True) reads what is on disk"
    return (
        f"The run in {path} could not be written further ({error}): {there}; make room and continue it with resume=True"
    )
