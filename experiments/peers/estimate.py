"""What a tool answers: one number per training example, in the words of this benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """The predicted change of the mean query loss without each example; positive where the example helped.

    Args:
        method: the tool's own name of the method.
        setting: ``"default"`` or what was changed, in words.
        values: one per training example, in the order of the training set.
        unit: whether the values are changes of the loss; otherwise only their order means something.
        seconds: processor time.
    """

    method: str
    setting: str
    values: Tensor
    unit: bool
    seconds: float


def timed(method: str, setting: str, compute: Callable[[], Tensor], *, unit: bool = True) -> Estimate:
    """Compute an estimate and take its processor time."""
    start = time.process_time()
    values = compute().detach().double().flatten()
    return Estimate(method, setting, values, unit, time.process_time() - start)
