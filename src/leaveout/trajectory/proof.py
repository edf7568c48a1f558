"""Proves the first step of a run while it is still being recorded: what would be refused later is said at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from leaveout._util.generators import aside
from leaveout.errors import LeaveoutError, UnsupportedError, first_line
from leaveout.run.reader import open_run
from leaveout.task.queries import restored
from leaveout.task.task import Task
from leaveout.trajectory.trajectory import Trajectory

UNTRACED = {"trace": False}
"""Options of a task that computes one step."""


def first_step_problem(path: Path, task_of: Callable[[], Task], *owners: Any) -> LeaveoutError | None:
    """Return why the first step on disk cannot be scored with the task that is made here; None if it follows from it.

    The training goes on as if nothing had been computed: no buffer, gradient or random generator changes, not even one
    that these owners hold, the data set and collator.
    """
    try:
        with restored(*owners), aside():
            prove(path, task_of())
    except LeaveoutError as problem:
        return problem
    except Exception as error:  # noqa: BLE001 - a user's model or data set may raise anything; training must go on
        return UnsupportedError(
            f"A trial of the first step fails ({first_line(error)}): give task(loss=..., forward=...) a loss per "
            "example and how the model is called.",
            code="task-not-supported",
        )
    return None


def prove(path: Path, task: Task) -> None:
    """Compute the first step on disk again, and refuse it if it does not end where it was recorded to."""
    trajectory = Trajectory(open_run(path, partial=True), task)
    recorded = trajectory.recorded_step(0)
    trajectory.check.step(recorded, trajectory.check.recomputed(recorded, recorded.params))
