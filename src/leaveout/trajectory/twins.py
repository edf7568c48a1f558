"""One objective on several threads: a call swaps parameters inside modules, so each thread has its own modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from leaveout.compute.threads import spread
from leaveout.task.objective import Objective

A = TypeVar("A")
B = TypeVar("B")


def twins(objective: Objective) -> list[Objective]:
    """Return the objective and copies of it, one per CPU thread; the objective alone if its model is on another device.

    Copies share the parameters, which every call replaces. A model that cannot be copied has no twins.
    """
    same = [objective]
    shared = {id(param): param for param in objective.model.parameters()}
    for _ in range(_threads(objective.device) - 1):
        try:
            called = copy.deepcopy(objective.called, dict(shared))
        except Exception:  # noqa: BLE001 - a module may refuse in its own way
            break
        same.append(replace(objective.untraced(), called=called))
    return same


def _threads(device: torch.device) -> int:
    return torch.get_num_threads() if device.type == "cpu" else 1


def on_threads(same: Sequence[Objective], function: Callable[[Objective, A], B], items: Sequence[A]) -> list[B]:
    """Apply a function of an objective and an item to all items, each twin on a thread of its own."""
    # The choice of an attention kernel applies to the whole process: one thread must not undo it for another. Under
    # autocast, the kernel that training used rounds as training did.
    with sdpa_kernel(SDPBackend.MATH) if same[0].mode.autocast is None else nullcontext():
        return spread([partial(function, objective) for objective in same], items)
