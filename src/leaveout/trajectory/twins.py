"""One task on several threads at once: a call swaps parameters inside modules, so each thread has its own modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from leaveout.compute.threads import spread
from leaveout.task.task import Task

A = TypeVar("A")
B = TypeVar("B")


def twins(task: Task) -> list[Task]:
    """Return the task and copies of it, one per CPU thread; the task alone if its model is on another device.

    Copies share the parameters, which every call replaces. A model that cannot be copied has no twins.
    """
    tasks = [task]
    shared = {id(param): param for param in task.model.parameters()}
    for _ in range(_threads(task.device) - 1):
        twin = task.quiet()
        try:
            twin.called = copy.deepcopy(task.called, dict(shared))
        except Exception:  # noqa: BLE001 - a module may refuse in its own way
            break
        twin.model = twin.called.model
        tasks.append(twin)
    return tasks


def _threads(device: torch.device) -> int:
    return torch.get_num_threads() if device.type == "cpu" else 1


def on_threads(tasks: Sequence[Task], function: Callable[[Task, A], B], items: Sequence[A]) -> list[B]:
    """Apply a function of a task and an item to all items, each twin on a thread of its own."""
    # The choice of an attention kernel applies to the whole process: one thread must not undo it for another. Under
    # autocast, the kernel that training used rounds as training did.
    with sdpa_kernel(SDPBackend.MATH) if tasks[0].autocast is None else nullcontext():
        return spread([partial(function, task) for task in tasks], items)
