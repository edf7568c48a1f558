"""What is left out: single examples or named groups, each a row of the scores."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from leaveout.errors import InputError

Groups: TypeAlias = Mapping[Any, Sequence[int]] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class LeftOut:
    """Rows of examples: row r leaves out the next ``lengths[r]`` of ``examples``, all at once."""

    names: tuple[int | str, ...]
    examples: Int[Tensor, " examples"]
    lengths: Int[Tensor, " rows"]

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def _order(self) -> Int[Tensor, " examples"]:
        return torch.argsort(self.examples, stable=True)

    @cached_property
    def _sorted(self) -> Int[Tensor, " examples"]:
        """The examples in ascending order."""
        return self.examples[self._order]

    @cached_property
    def _owner(self) -> Int[Tensor, " examples"]:
        """The row of each of the sorted examples."""
        return torch.arange(len(self)).repeat_interleave(self.lengths)[self._order]

    @cached_property
    def _is_everyone(self) -> bool:
        """Say whether these are the first examples, one per row and in order, so that a row is its example's number."""
        return torch.equal(self.examples, torch.arange(len(self)))

    @cached_property
    def _starts(self) -> Int[Tensor, " rows"]:
        return self.lengths.cumsum(0) - self.lengths

    def pairs(self, ids: Int[Tensor, " batch"]) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]:
        """Return (row, position in the batch) for every example of the batch that a row leaves out.

        >>> rows, positions = leave_out(3, groups=[[0, 2], [2]]).pairs(torch.tensor([2, 1, 0]))
        >>> list(zip(rows.tolist(), positions.tolist()))
        [(0, 0), (1, 0), (0, 2)]
        >>> leave_out(2).pairs(torch.tensor([5, 1]))
        (tensor([1]), tensor([1]))
        """
        flat, owner = self._sorted, self._owner
        if self._is_everyone and int(ids.max()) < len(self):
            return ids, torch.arange(len(ids))
        first = torch.searchsorted(flat, ids)
        count = torch.searchsorted(flat, ids, right=True) - first
        positions = torch.arange(len(ids)).repeat_interleave(count)
        within = torch.arange(len(positions)) - (count.cumsum(0) - count).repeat_interleave(count)
        return owner[first.repeat_interleave(count) + within], positions

    def named(self) -> dict[str, list[int]] | None:
        """Return the members of each group by name; None if rows are single examples."""
        if not isinstance(self.names[0], str):
            return None
        parts = self.examples.split(self.lengths.tolist())
        return {str(name): part.tolist() for name, part in zip(self.names, parts, strict=True)}

    def identity(self) -> str:
        """Return a hash of which examples each row leaves out."""
        return hashlib.sha256(b"".join(t.numpy().tobytes() for t in (self.lengths, self.examples))).hexdigest()

    def keys(self, row: Int[Tensor, " pairs"]) -> Int[Tensor, " pairs"]:
        """Return the first example of each row, which stays the same within a chunk of the rows."""
        return self.examples[self._starts[row]]

    def chunks(self, size: int) -> Iterator[LeftOut]:
        """Yield the rows in chunks of at most ``size``."""
        starts = [*self._starts[::size].tolist(), len(self.examples)]
        for number, start in enumerate(range(0, len(self), size)):
            rows = slice(start, start + size)
            yield LeftOut(self.names[rows], self.examples[starts[number] : starts[number + 1]], self.lengths[rows])


def leave_out(size: int, ids: Sequence[int] | Tensor | None = None, groups: Groups | None = None) -> LeftOut:
    """Return rows for every example, for chosen examples, or for groups of them.

    >>> leave_out(3).names
    (0, 1, 2)
    >>> leave_out(3, groups={"ann": [0, 2]}).examples
    tensor([0, 2])
    """
    if groups is None:
        if ids is None:
            return LeftOut(tuple(range(size)), torch.arange(size), torch.ones(size, dtype=torch.int64))
        chosen = _checked(ids, size, "ids")
        if len(set(chosen)) < len(chosen):
            repeated = next(i for i in chosen if chosen.count(i) > 1)
            raise InputError(f"Example {repeated} is named twice in ids: name each example once.", code="ids-repeated")
        return rows_of(tuple(chosen), [[i] for i in chosen])
    if ids is not None:
        raise InputError("Both ids and groups were given: give one of them.", code="ids-given-twice")
    items = list(groups.items() if isinstance(groups, Mapping) else enumerate(_listed(groups, "groups")))
    if not items:
        raise InputError("groups is empty: give at least one group of example numbers.", code="groups-empty")
    named: dict[str, list[int]] = {}  # names are strings; numbers are single examples
    for name, group in items:
        if str(name) in named:
            raise InputError(
                f"Two groups have the name {str(name)!r}: give each group a name of its own.",
                code="group-names-repeated",
            )
        named[str(name)] = sorted(set(_checked(group, size, f"group {str(name)!r}")))
    return rows_of(tuple(named), list(named.values()))


def rows_of(names: tuple[int | str, ...], groups: Sequence[Sequence[int]]) -> LeftOut:
    """Return a row for each of these groups of examples, which must be known to exist."""
    examples = torch.tensor([i for group in groups for i in group], dtype=torch.int64)
    return LeftOut(names, examples, torch.tensor([len(group) for group in groups]))


def _checked(ids: Any, size: int, what: str) -> list[int]:
    """Return the given example numbers as a list, after checking that the examples exist."""
    numbers = []
    for given in _listed(ids, what):
        number = _as_number(given)
        if number is None:
            raise InputError(
                f"{what} holds {given!r}: give example numbers (for a mask, the positions where it is true).",
                code="id-not-a-number",
            )
        if not 0 <= number < size:
            raise InputError(
                f"Example {number} in {what} does not exist: the training set has numbers 0 to {size - 1}.",
                code="id-out-of-range",
            )
        numbers.append(number)
    if not numbers:
        raise InputError(f"{what} is empty: name at least one example.", code="ids-empty")
    return numbers


def _listed(given: Any, what: str) -> list[Any]:
    try:
        return list(given)
    except TypeError:
        raise InputError(f"{what} is {given!r}, not a list: give a list, like [0, 3].", code="list-expected") from None


def _as_number(value: Any) -> int | None:
    """Return a whole number as int; None for anything else, such as a boolean or a string of digits."""
    if isinstance(value, bool | str | bytes) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return int(value) if int(value) == value else None
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last from tensors with several numbers
        return None
