"""A run's objective in the modes in which its steps were taken: modules may be switched to evaluation mode midway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from leaveout._util.trees import Params
from leaveout.run.reader import Run
from leaveout.run.record import Record
from leaveout.task.guard.comparison import Comparison
from leaveout.task.guard.coupled import coupled_defaults
from leaveout.task.modules import mode_matters
from leaveout.task.objective import Objective
from leaveout.task.preparing import trial_batch
from leaveout.task.task import Task

At: TypeAlias = tuple[int, Params, list[int]]
"""A state with a name, and examples."""


class Seen(NamedTuple):
    """The objective as a step saw it.

    Attributes:
        whole: for all parameters, with the rounding of mixed precision.
        trained: for the chosen parameters, with that rounding: for values.
        objective: for the chosen parameters, without it: for derivatives.
    """

    whole: Objective
    trained: Objective
    objective: Objective


class Modes:
    """The objective as each step saw it.

    Args:
        run: the recorded run.
        task: what was trained.
        layers: the parameters to look at, if not all.
        at: a state at which derivatives are compared as well, its name, and on which examples.
    """

    def __init__(self, run: Run, task: Task, layers: str | Sequence[str] | None = None, at: At | None = None) -> None:
        self._run, self._task, self._layers, self._at = run, task, layers, at
        self._several = len(run.manifest.modes) > 1
        named = task.objective.called.named if self._several else []
        self._matters = {name for name, module in named if mode_matters(module)}
        self._first = run.record(0).training
        self._seen: dict[tuple[frozenset[str] | None, float], Seen] = {}

    @property
    def first(self) -> Seen:
        """The objective as the first step saw it."""
        return self._in_mode(None if self._first is None else frozenset(self._first), 1.0)

    def of(self, record: Record) -> Seen:
        """Return the objective as a step saw it."""
        return self._in_mode(*self._mode_of(record))

    def _mode_of(self, record: Record) -> tuple[frozenset[str] | None, float]:
        """Return the modules in training mode at a step, and the scale of its loss."""
        first = None if self._first is None else frozenset(self._first)
        scale = record.scale if self._run.manifest.autocast == "float16" else 1.0
        if not self._several or record.training is None or first is None:
            return (first if not self._several or record.training is None else frozenset(record.training)), scale
        mode = frozenset(record.training)
        # Only modules that compute something different in training mode count.
        return (mode if self._matters & (mode ^ first) else first), scale

    def compared_at(self, at: At) -> Modes:
        """Return the same with derivatives that are also compared at another state."""
        return Modes(self._run, self._task, self._layers, at)

    def comparison(self, record: Record) -> Comparison | None:
        """Return what was found out about derivatives in the mode of a step; None if nothing is compared."""
        if self._at is None or not self._task.check:
            return None
        return self._compared(self._recorded(*self._mode_of(record)).in_mode(autocast=None, loss_scale=1.0))

    def _in_mode(self, mode: frozenset[str] | None, scale: float) -> Seen:
        if (mode, scale) not in self._seen:
            self._seen[mode, scale] = self._made(mode, scale)
        return self._seen[mode, scale]

    def _made(self, mode: frozenset[str] | None, scale: float) -> Seen:
        whole = self._recorded(mode, scale)
        uncast = whole.in_mode(autocast=None, loss_scale=1.0)
        if self._at is not None and self._task.check:
            abilities = self._compared(uncast).abilities
            whole, uncast = whole.able(abilities), uncast.able(abilities)
        return Seen(whole, whole.restricted(self._layers), uncast.restricted(self._layers))

    def _recorded(self, mode: frozenset[str] | None, scale: float) -> Objective:
        """Return the objective as recorded in a mode, with what is known of its derivatives at the task's state."""
        given, manifest = self._task.objective, self._run.manifest
        cast = None if manifest.autocast is None else getattr(torch, manifest.autocast)
        training = given.mode.training if mode is None else mode
        whole = given.in_mode(training=training, buffers=tuple(manifest.buffers), autocast=cast, loss_scale=scale)
        coupled = whole.coupled and whole.mode != given.mode
        return whole.able(coupled_defaults(whole, given.abilities)) if coupled else whole

    def _compared(self, objective: Objective) -> Comparison:
        """Compare derivatives at the other state, once per run and task."""
        assert self._at is not None  # noqa: S101 - asked before
        key, params, ids = self._at

        def made() -> Comparison:
            return Comparison(objective, params, trial_batch(objective, params, self._task.read(ids)))

        return objective.execution.memory.recall(("compared", key, objective, objective.abilities), made)
