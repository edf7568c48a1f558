"""Computing beside a training: the states of random generators, noted and restored, and passes that nobody notes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

RandomState: TypeAlias = dict[str, Tensor]
"""The states of PyTorch's random generators by device, such as ``"cpu"`` and ``"cuda:0"``."""


def random_state(*devices: str | torch.device) -> RandomState:
    """Return the states of the CPU's random generator and of those of these devices."""
    states = {"cpu": torch.get_rng_state()}
    for name in devices:
        device = torch.empty(0, device=name).device  # "cuda" is "cuda:0"
        if device.type != "cpu":
            states[str(device)] = torch.get_device_module(device).get_rng_state(*_index(device))
    return states


def set_random_state(state: RandomState) -> None:
    """Set the random generators to these states."""
    for name, value in state.items():
        device = torch.device(name)
        if device.type == "cpu":
            torch.set_rng_state(value)
        else:
            torch.get_device_module(device).set_rng_state(value, *_index(device))


def is_same(a: RandomState, b: RandomState) -> bool:
    """Return whether two states are equal."""
    return all(torch.equal(a[name], b[name]) for name in a)


def _index(device: torch.device) -> tuple:
    """Return the device as an argument; Apple's (MPS) has one generator and takes no argument."""
    return () if device.type == "mps" else (device,)


@contextmanager
def undisturbed(*devices: str | torch.device) -> Iterator[None]:
    """Leave the generators of PyTorch, numpy and Python as they were before this context."""
    states = random_state(*devices), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        set_random_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


_DEPTH = [0]


@contextmanager
def aside() -> Iterator[None]:
    """Let no recorder note the forward passes in this context."""
    _DEPTH[0] += 1
    try:
        yield
    finally:
        _DEPTH[0] -= 1


def is_aside() -> bool:
    """Return whether forward passes are not to be noted."""
    return _DEPTH[0] > 0
