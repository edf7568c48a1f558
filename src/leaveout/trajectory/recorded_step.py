"""One recorded step with everything that it needs."""

from __future__ import annotations

from dataclasses import dataclass

from leaveout._util.trees import Params, State
from leaveout.run.record import Record
from leaveout.task.batches import Batch
from leaveout.task.task import Task


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step with everything that it needs: its batch and the states around it.

    ``params`` are all parameters before the step, also where the states hold chosen ones only. ``task`` is the task in
    the modes of this step, for derivatives; ``trained`` the same with the rounding of mixed precision, for values.
    ``exact`` is false where the states are interpolated, and the one does not lead to the other.
    """

    record: Record
    before: State
    after: State
    batch: Batch
    params: Params
    task: Task
    trained: Task
    exact: bool = True
