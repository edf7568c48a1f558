"""Equality of dataclasses that hold tensors and tables, whose own ``==`` does not give a single answer."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def same(left: Any, right: Any) -> bool:
    """Compare two values part by part: tensors and tables by all their entries, NaN equal to NaN.

    >>> same({"a": torch.ones(2)}, {"a": torch.ones(2)}), same([math.nan], [math.nan]), same(1, "1")
    (True, True, False)
    """
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bool(torch.equal(left, right))
    if hasattr(left, "equals"):  # a table of pandas, which need not be installed
        return bool(left.equals(right))
    if is_dataclass(left):
        return all(same(getattr(left, field.name), getattr(right, field.name)) for field in fields(left))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right) or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


class Comparable:
    """A dataclass (``eq=False``) whose ``==`` compares the values of its fields."""

    def __eq__(self, other: object) -> bool:
        return same(self, other) if type(self) is type(other) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # tensors inside may change
