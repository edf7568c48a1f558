"""A run's task in the modes in which its steps were taken: modules may be switched to evaluation mode midway."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from leaveout._util.trees import Params
from leaveout.run.reader import Run
from leaveout.run.record import Record
from leaveout.task.guard.comparison import Comparison
from leaveout.task.modules import mode_matters
from leaveout.task.task import Task

Mode: TypeAlias = frozenset[str] | None
"""The modules in training mode; None for runs that do not record them."""


class View(NamedTuple):
    """The task in one mode.

    Attributes:
        whole: for all parameters, with the rounding of mixed precision.
        trained: for the chosen parameters, with that rounding: for values.
        task: for the chosen parameters, without it: for derivatives.
    """

    whole: Task
    trained: Task
    task: Task


class Modes:
    """The task as each step saw it.

    Args:
        run: the recorded run.
        task: what was trained.
        layers: the parameters to look at, if not all.
    """

    def __init__(self, run: Run, task: Task, layers: str | Sequence[str] | None = None) -> None:
        self._task, self._layers = task, layers
        self._buffers = tuple(run.manifest.buffers)
        self._cast = None if run.manifest.autocast is None else getattr(torch, run.manifest.autocast)
        self._several = len(run.manifest.modes) > 1
        self._matters = {n for n, module in task.called.named if mode_matters(module)} if self._several else set()
        self._first = run.record(0).training
        self._views: dict[tuple[Mode, float], View] = {}
        self._scaled = self._cast == torch.float16
        self._compared: tuple[int, Params, list[int]] | None = None

    @property
    def first(self) -> View:
        """The task as the first step saw it."""
        return self._view(self._first)

    def of(self, record: Record) -> View:
        """Return the task as a step saw it."""
        if not self._several and not self._scaled:
            return self.first
        return self._view(record.training if self._several else self._first, record.scale)

    def compared_at(self, key: int, params: Params, ids: list[int]) -> Modes:
        """Return the same with derivatives also compared on these examples at another state, which ``key`` names."""
        other = copy.copy(self)
        other._views, other._compared = {}, (key, params, ids)
        return other

    def comparison(self, record: Record) -> Comparison | None:
        """Return what was found out about derivatives in the modes of a step; None if nothing is compared."""
        whole = self.of(record).whole.uncast()
        return whole.comparison(*self._compared) if self._compared and whole.check else None

    def _view(self, training: tuple[str, ...] | None, scale: float = 1.0) -> View:
        mode = None if training is None else frozenset(training)
        if self._several and mode is not None and self._first is not None:
            # Only modules that compute something different in training mode count.
            mode = frozenset(self._first) if not self._matters & (mode ^ set(self._first)) else mode
        if (mode, scale) not in self._views:
            whole = self._task.as_recorded(mode, self._buffers, self._cast, scale)
            view = View(whole, whole.restricted(self._layers), whole.uncast().restricted(self._layers))
            if self._compared is not None:
                plain = whole.uncast()
                abilities = plain.comparison(*self._compared).abilities if plain.check else plain.abilities
                view = View(*map(copy.copy, view))
                for task in view:
                    task.abilities = abilities
            self._views[mode, scale] = view
        return self._views[mode, scale]
