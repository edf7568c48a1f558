"""One recorded step with everything it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from leaveout._util.trees import Params, State
from leaveout.run.record import Record
from leaveout.task.batches import Batch
from leaveout.task.objective import Objective


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step with everything it needs: its batch and the states before and after it.

    ``params`` are all parameters before the step, even if the states hold only chosen ones. ``objective`` is
    that of this step's mode, for derivatives; ``trained`` is the same with the rounding of mixed precision, for values.
    ``exact`` is false if the states are interpolated, so that one does not lead to the other.
    ``seen`` is what was seen of the loop besides its steps.
    """

    record: Record
    before: State
    after: State
    batch: Batch
    params: Params
    objective: Objective
    trained: Objective
    exact: bool = True
    seen: Mapping[str, str] = field(default_factory=dict)
