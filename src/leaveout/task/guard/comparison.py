"""Compares derivatives at a run's last state, and wherever else the model runs code that it did not run there.

A model that takes no decision by the values of its inputs or parameters runs the same code for all of them; ``vmap``
over examples and over models shows that, since it stops at such a decision. Only for the others every recorded batch
and every query is looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.func import vjp
from torch.overrides import TorchFunctionMode

from leaveout._util.trees import Params
from leaveout.task.batches import Batch, leaves
from leaveout.task.checks import refuse
from leaveout.task.guard.compare import compared
from leaveout.task.guard.hidden import matters
from leaveout.task.guard.points import widened
from leaveout.task.objective import Objective
from leaveout.task.preparing import TRIAL
from leaveout.task.rewrites.own_functions import calls
from leaveout.task.training_batch import TrainingBatch, parts_of, size_of, take


class Comparison:
    """The abilities that are right at a run's last state, and in every code that was looked at."""

    def __init__(self, objective: Objective, params: Params, batch: TrainingBatch) -> None:
        self._objective, self.abilities = objective, objective.abilities
        self._compare(params, batch, "at the run's last state")
        self._known = places(objective, params, batch) | places(objective, params, batch.batch)
        # Gradients are stopped, but without an effect so far.
        self._unseen = self.abilities.hidden and self.abilities.symmetric and not self._has_effect(params, batch)

    @property
    def open(self) -> bool:
        """Say whether what was found may not hold for other examples or parameters."""
        return not (self._objective.abilities.vmap and self._objective.abilities.stacks) or self._unseen

    def _has_effect(self, params: Params, batch: Batch) -> bool:
        return matters(*widened(self._objective, params, batch))

    def add(self, params: Params, batch: Batch, where: str) -> None:
        """Compare on examples that run code which none did so far; ``where`` they are, for error messages."""
        for part in parts_of(batch):
            if self._is_new(params, part):
                if not (self._objective.coupled or getattr(part, "whole", None)):
                    rows = list(range(size_of(part)))
                    new = [i for i in rows if self._is_new(params, _chosen(part, [i]))]
                    part = _chosen(part, (new or rows)[:TRIAL])
                self._compare(params, part, where)
                self._unseen = self._unseen and not self._has_effect(params, part)
                self._known |= places(self._objective, params, part)

    def _is_new(self, params: Params, batch: Batch) -> bool:
        """Say whether examples run other code than those compared, or are the first on which a stop has an effect."""
        if not places(self._objective, params, batch) <= self._known:
            return True
        return self._unseen and self._has_effect(params, batch)

    def _compare(self, params: Params, batch: Batch, where: str) -> None:
        problem, self.abilities = compared(self._objective, params, batch, self.abilities)
        refuse([f"{where}, {problem}"] if problem else [])


def _chosen(batch: Batch, rows: list[int]) -> Batch:
    return take(batch, torch.tensor(rows, device=leaves(batch)[0].device))


def places(objective: Objective, params: Params, batch: Batch) -> set[Any]:
    """Return the places in the code from which PyTorch is called in a forward pass, and the model's own functions."""
    with calls() as made, _Places() as seen:
        vjp(lambda q: objective.losses({**params, **q}, batch), objective.variables(params))
    return seen.found | {function for function, _ in made}


class _Places(TorchFunctionMode):
    """Notes the places in the code from which functions of PyTorch are called, outside of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[Any, int]] = set()

    def __torch_function__(
        self, function: Callable, _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame: Any = sys._getframe(1)
        while frame.f_globals.get("__name__", "").startswith("leaveout.") and frame.f_back:
            frame = frame.f_back
        self.found.add((frame.f_code, frame.f_lasti))
        return function(*args, **(kwargs or {}))
