"""One recorded step with everything that it needs."""

from __future__ import annotations

from dataclasses import dataclass

from leaveout._util.trees import Params, State
from leaveout.run.reader import Record
from leaveout.task.batches import Batch


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step with everything that it needs: its batch and the states around it.

    ``params`` are all parameters before the step, also where the states hold chosen ones only. ``exact`` is false
    where the states are interpolated, and the one does not lead to the other.
    """

    record: Record
    before: State
    after: State
    batch: Batch
    params: Params
    exact: bool = True
