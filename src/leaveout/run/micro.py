"""The micro-batches of steps as stored in a shard: lengths, denominators, random states, modes; only where needed.

A step on one batch whose forward pass drew no random numbers needs none of them; a shard of such steps has no tensors
for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from leaveout._util.generators import RandomState
from leaveout._util.tensor_files import Rows

FURTHER = "step/"
MODES = "step/modes"
SCALES = "step/scales"
COUNTS = "step/counts"
LENGTHS = "step/lengths"
DENOMINATORS = "step/denominators"
STATES = "step/random"
RANDOM = "step/random/"
AFTER = "step/after/"
"""One row per kept state."""


class Micro(NamedTuple):
    """One micro-batch of a step.

    Attributes:
        length: how many examples it has.
        random: the generators' states before its forward pass; None if the pass drew no random numbers.
        denominator: what its loss was divided by, if the loop gave it.
    """

    length: int
    random: RandomState | None = None
    denominator: float | None = None

    @property
    def is_plain(self) -> bool:
        """Say whether the length alone describes it."""
        return self.random is None and self.denominator is None


def written(steps: Sequence[tuple[Micro, ...]]) -> dict[str, Tensor | Rows]:
    """Return the tensors for a shard's steps; none if every step has one plain micro-batch.

    >>> written([(Micro(2),)])
    {}
    """
    if all(len(parts) == 1 and parts[0].is_plain for parts in steps):
        return {}
    flat = [part for parts in steps for part in parts]
    drawn = [part.random for part in flat if part.random is not None]
    places = iter(range(len(drawn)))
    denominators = [math.nan if part.denominator is None else part.denominator for part in flat]
    tensors: dict[str, Tensor | Rows] = {
        COUNTS: torch.tensor([len(parts) for parts in steps]),
        LENGTHS: torch.tensor([part.length for part in flat]),
        DENOMINATORS: torch.tensor(denominators, dtype=torch.float64),
        STATES: torch.tensor([-1 if part.random is None else next(places) for part in flat]),
    }
    for device in drawn[0] if drawn else ():
        tensors[f"{RANDOM}{device}"] = [state[device] for state in drawn]
    return tensors


def micro_of(shard: dict[str, Tensor], offset: int) -> tuple[Micro, ...]:
    """Return the micro-batches of one step; none if nothing was written about them."""
    if COUNTS not in shard:
        return ()
    start = int(shard[COUNTS][:offset].sum())
    devices = {key.removeprefix(RANDOM): value for key, value in shard.items() if key.startswith(RANDOM)}
    parts = []
    for place in range(start, start + int(shard[COUNTS][offset])):
        state, denominator = int(shard[STATES][place]), float(shard[DENOMINATORS][place])
        random = None if state < 0 else {device: value[state].clone() for device, value in devices.items()}
        parts.append(Micro(int(shard[LENGTHS][place]), random, None if math.isnan(denominator) else denominator))
    return tuple(parts)


def is_sound(shard: dict[str, Tensor], lengths: Tensor, modes: int, kept: int) -> bool:
    """Say whether the tensors are valid for steps of these lengths and this number of modes and kept states."""
    return (
        _states_after_are_sound(shard, kept)
        and _scales_are_sound(shard, lengths)
        and _modes_are_sound(shard, len(lengths), modes)
        and _micro_batches_are_sound(shard, lengths)
    )


def _states_after_are_sound(shard: dict[str, Tensor], kept: int) -> bool:
    after = [value for key, value in shard.items() if key.startswith(AFTER)]
    return all(_are_generator_states(value) and len(value) == kept for value in after)


def _scales_are_sound(shard: dict[str, Tensor], lengths: Tensor) -> bool:
    scales = shard.get(SCALES)
    if scales is None:
        return True
    return scales.dtype == torch.float64 and scales.shape == lengths.shape and bool((scales > 0).all())


def _modes_are_sound(shard: dict[str, Tensor], steps: int, modes: int) -> bool:
    indices = shard.get(MODES)
    return indices is None or (_is_whole(indices, steps) and _within(indices, 0, modes))


def _micro_batches_are_sound(shard: dict[str, Tensor], lengths: Tensor) -> bool:
    columns = {LENGTHS, DENOMINATORS, STATES}
    if COUNTS not in shard:
        return not columns & set(shard)
    if not columns <= set(shard) or not _is_whole(shard[COUNTS], len(lengths)):
        return False
    counts = shard[COUNTS].tolist()
    if min(counts) < 1 or not all(_is_whole(shard[key], sum(counts)) for key in (LENGTHS, STATES)):
        return False
    lengths_of_steps = [int(part.sum()) for part in shard[LENGTHS].split(counts)]
    random = [value for key, value in shard.items() if key.startswith(RANDOM)]
    states = min((len(value) for value in random), default=0)
    denominators = shard[DENOMINATORS]
    return (
        lengths_of_steps == lengths.tolist()
        and int(shard[LENGTHS].min()) >= 1
        and _within(shard[STATES], -1, states)
        and all(_are_generator_states(value) for value in random)
        and denominators.dtype == torch.float64
        and denominators.shape == shard[LENGTHS].shape
        and not bool((denominators <= 0).any())
    )


def _are_generator_states(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8 and tensor.ndim == 2


def _is_whole(tensor: Tensor, count: int) -> bool:
    return tensor.dtype == torch.int64 and tensor.shape == (count,)


def _within(tensor: Tensor, first: int, stop: int) -> bool:
    return bool(((tensor >= first) & (tensor < stop)).all())
