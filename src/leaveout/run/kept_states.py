"""The states of a shard as tensors: their names and shapes, whole or as the gradients that led to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from leaveout._util.tensor_files import Rows
from leaveout._util.trees import PARAM, Params, State
from leaveout.errors import RunError
from leaveout.optim import AVERAGE
from leaveout.run.gradient_states import StepGradients
from leaveout.run.manifest import AGAIN, Manifest

KEPT = "kept"
"""The indices of the states that a shard holds."""

WHOLE = "whole"
"""The indices of the states that it stores whole; absent if all are whole."""

GIVEN = "given/"
"""What the optimizer was given at a step; one row for each state that is not stored whole."""


def written(states: Mapping[int, State | StepGradients]) -> dict[str, Tensor | Rows]:
    """Return the tensors of a shard's states."""
    tensors: dict[str, Tensor | Rows] = {KEPT: torch.tensor(list(states), dtype=torch.int64)}
    flat = {index: flatten(state) for index, state in states.items() if not isinstance(state, StepGradients)}
    given = [state.tensors for state in states.values() if isinstance(state, StepGradients)]
    for rows, start in ((list(flat.values()), ""), (given, GIVEN)):
        tensors |= {f"{start}{key}": [row[key] for row in rows] for key in (rows[0] if rows else ())}
    if given:
        tensors[WHOLE] = torch.tensor(list(flat), dtype=torch.int64)
    return tensors


def flatten(state: State) -> dict[str, Tensor]:
    """Return a state's tensors by their names in a file."""
    return {f"state/{slot}/{name}": tensor for slot, params in state.items() for name, tensor in params.items()}


def whole(shard: Mapping[str, Tensor]) -> Tensor:
    """Return the indices of the states that a shard stores whole."""
    return shard.get(WHOLE, shard[KEPT])


class StateTensors:
    """What the states of a run look like in its files."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    @cached_property
    def keys(self) -> set[str]:
        """The names of a state's tensors."""
        return {f"state/{slot}/{name}" for slot in self._manifest.rule.slots for name in self._names(slot)}

    @property
    def given(self) -> set[str]:
        """The names of the tensors that hold what a step was given."""
        return {f"{GIVEN}{name}" for name in self._names(PARAM)}

    def unflatten(self, tensors: Mapping[str, Tensor], place: int | None = None) -> State:
        """Return one state as copies, which do not depend on the file any more."""
        return {
            slot: {name: _row(tensors[f"state/{slot}/{name}"], place) for name in self._names(slot)}
            for slot in self._manifest.rule.slots
        }

    def given_at(self, shard: Mapping[str, Tensor], index: int) -> Params:
        """Return copies of what was given to the step that led to the state before step ``index``."""
        place = int(torch.searchsorted(shard[KEPT], index)) - int(torch.searchsorted(shard[WHOLE], index))
        return {name: shard[f"{GIVEN}{name}"][place].clone() for name in self._names(PARAM)}

    def check(self, file: Path, tensors: Mapping[str, Tensor], count: int) -> None:
        """Refuse tensors that are not ``count`` states of this run."""
        for slot in self._manifest.rule.slots:
            for name in self._names(slot):
                shape = self._manifest.rule.shape(slot, self._manifest.shapes.get(name, ()))
                self._check_one(file, tensors[f"state/{slot}/{name}"], slot, name, [count, *shape])

    def check_given(self, file: Path, shard: Mapping[str, Tensor]) -> None:
        """Refuse gradients that do not match the states that a shard does not store whole."""
        kept, as_they_are = shard[KEPT].tolist(), shard[WHOLE]
        sound = as_they_are.dtype == torch.int64 and as_they_are.ndim == 1
        listed: Sequence[int] = as_they_are.tolist() if sound else [-1]
        if listed != sorted(set(listed)) or not set(listed) <= set(kept):
            raise RunError(f"{file} has other states whole than it keeps: {AGAIN}", code="run-damaged")
        for name in self._names(PARAM):
            rows = len(kept) - len(listed)
            shape = [rows, *self._manifest.shapes.get(name, ())]
            self._check_one(file, shard[f"{GIVEN}{name}"], "gradient", name, shape)

    def _names(self, slot: str) -> list[str]:
        """Return the names in a slot: the trained parameters and, in some slots, the model's moving buffers."""
        buffers = {PARAM: self._manifest.buffers, AVERAGE: self._manifest.averaged}.get(slot, {})
        return [*self._manifest.rule.groups, *buffers]

    def _check_one(self, file: Path, tensor: Tensor, slot: str, name: str, shape: list[int]) -> None:
        moving = self._manifest.buffers.get(name)
        expected = shape if moving is None else [shape[0], *moving]
        dtype = self._manifest.dtypes[name if moving is None else next(iter(self._manifest.dtypes))]
        if list(tensor.shape) != expected or str(tensor.dtype) != f"torch.{dtype}":
            raise RunError(
                f"{file} does not hold the states of this run ({slot} of {name!r}): {AGAIN}", code="run-damaged"
            )


def _row(tensor: Tensor, place: int | None) -> Tensor:
    return (tensor if place is None else tensor[place]).clone()
