"""Training in several processes (``DistributedDataParallel``): each has a recorder, and the first one writes.

The processes' batches are micro-batches of one step: the gradients are averaged over them. What only one process knows
(its examples, random generators, batches to keep) is gathered after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from leaveout._util.trees import State
from leaveout.errors import UnsupportedError
from leaveout.optim.averaging import Update
from leaveout.run.gradient_states import StepGradients
from leaveout.run.manifest import Manifest
from leaveout.run.record import Record
from leaveout.run.recording.noting import fingerprints
from leaveout.run.recording.pending import StepInputs

NEVER = 2**62
"""The interval between kept states in processes that do not write: so long that none is kept."""


class Processes:
    """The processes of one training.

    Args:
        resume: whether a run is to be resumed, which several processes cannot do.
    """

    def __init__(self, *, resume: bool) -> None:
        if resume:
            raise UnsupportedError(
                "A run of several processes cannot be resumed: how each of them would go on (its random generator, its "
                "place in the data) is not recorded. Record it again from the start, or train in one process.",
                code="distributed-not-resumed",
            )
        own = distributed.get_backend() == "gloo"
        self._group = None if own else distributed.new_group(backend="gloo")  # objects are sent between CPUs
        self.first = distributed.get_rank() == 0

    def gathered(self, inputs: StepInputs) -> StepInputs:
        """Return all processes' parts of a step, in rank order, in the first process; each other gets its own part."""
        inputs = inputs._replace(fingerprint=fingerprints([inputs])[0], unhashed=[])
        parts: list[Any] | None = [None] * distributed.get_world_size() if self.first else None
        distributed.gather_object(inputs, parts, dst=0, group=self._group)
        if parts is None:
            return inputs
        return inputs._replace(
            ids=torch.cat([part.ids for part in parts]),
            fingerprint=[mark for part in parts for mark in part.fingerprint],
            micro=tuple(one for part in parts for one in part.micro),
            batches=tuple(batch for part in parts for batch in part.batches),
        )

    def wait(self) -> None:
        """Wait for all processes: after that, what the first one writes is on disk."""
        distributed.barrier(group=self._group)


def processes_of(model: nn.Module, *, resume: bool) -> Processes | None:
    """Return the processes that train a model, if there are several."""
    shared = isinstance(model, nn.parallel.DistributedDataParallel) and distributed.get_world_size() > 1
    return Processes(resume=resume) if shared else None


class NoWriter:
    """Replaces the writer in processes that do not write."""

    before = None
    newest = None
    unfinished = False

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def begin(self, manifest: Manifest, initial: State) -> None:
        """Do nothing: the first process does all the writing."""

    def note(self, fact: str, value: str) -> None:
        """See ``begin``."""

    def append(self, record: Record, state: State | StepGradients | None, held: int | None = None) -> None:
        """See ``begin``."""

    def settle(self, final: Callable[[], State | None]) -> bool:  # noqa: ARG002
        """See ``begin``."""
        return False

    def amend(self, average: Update, slot: State) -> bool:  # noqa: ARG002
        """See ``begin``."""
        return True

    def flush(self, state: State | None) -> bool:  # noqa: ARG002
        """See ``begin``."""
        return False

    def finish(self, final: State | None = None, *, complete: bool = True) -> None:
        """See ``begin``."""

    def abandon(self) -> None:
        """See ``begin``."""
