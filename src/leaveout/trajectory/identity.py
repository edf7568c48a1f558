"""What distinguishes one computation on a run from another, so that parts of it can be saved and found again."""

from __future__ import annotations

from importlib.metadata import version

import torch

from leaveout._util.files import tensor_checksum
from leaveout._util.trees import Params
from leaveout.run.reader import Run
from leaveout.task.task import Task

SAMPLE = 64
"""How many training examples identify a task, at least; fewer than twice as many."""


def identity(run: Run, task: Task, params: Params, *asked: object) -> str:
    """Return everything that shards of the same work have in common, as text.

    Args:
        run: identified by its manifest, which has the checksums of all its files, and by how it is read.
        task: identified by the losses of some training examples, which another task or other data would change.
        params: the parameters at which these losses are computed.
        asked: anything else that distinguishes this work from other work.
    """
    step = max(1, task.size // SAMPLE)
    if task.random_data:  # its losses differ each time
        return f"{version('leaveout')} {run.manifest} {len(run)} {run.interpolate} {asked}"
    with torch.no_grad():
        losses = tensor_checksum(task.objective.losses(params, task.read(range(0, task.size, step))))
    return f"{version('leaveout')} {run.manifest} {len(run)} {run.interpolate} {losses} {asked}"
