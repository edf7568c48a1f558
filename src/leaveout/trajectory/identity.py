"""What tells one computation on a run from another, so that parts of it can be kept and found again."""

from __future__ import annotations

from importlib.metadata import version

import torch

from leaveout._util.files import tensor_checksum
from leaveout._util.trees import Params
from leaveout.run.reader import Run
from leaveout.task.task import Task

SAMPLE = 64
"""Training examples that a task is known by."""


def identity(run: Run, task: Task, params: Params, *asked: object) -> str:
    """Everything that shards of the same work share.

    Args:
        run: known by its manifest, which has the checksums of all its files, and how it is read.
        task: known by some training examples' losses: another task or other data give others.
        params: at which these are taken.
        asked: anything else that tells the work from other work.
    """
    step = max(1, task.size // SAMPLE)
    if task.random_data:  # its losses are others each time
        return f"{version('leaveout')} {run.manifest} {len(run)} {run.interpolate} {asked}"
    with torch.no_grad():
        losses = tensor_checksum(task.losses(params, task.read(range(0, task.size, step))))
    return f"{version('leaveout')} {run.manifest} {len(run)} {run.interpolate} {losses} {asked}"
