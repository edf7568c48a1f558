"""How derivatives of an objective are computed, as opposed to what they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch.func import vmap

from leaveout.diff.forms import Abilities
from leaveout.task.batches import leaves, pick
from leaveout.task.trace.tracer import Tracer

T = TypeVar("T")


class Memory:
    """What was found out about a task once: traces of its computations, and answers to questions about it.

    Nothing in it changes a result. Another process starts with an empty one.

    Args:
        images: whether images get another layout in memory.
        never: whether nothing is traced.
    """

    def __init__(self, images: bool = False, never: bool = False) -> None:
        self._images, self._never = images, never
        self._tracers: dict[Hashable, Tracer] = {}
        self._found: dict[Hashable, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.fresh().__dict__

    def fresh(self) -> Memory:
        """Return one in which nothing has been found out yet."""
        return Memory(self._images, self._never)

    def beside(self, *, never: bool = False) -> Memory:
        """Return one with the same answers and traces of its own, or none."""
        other = Memory(self._images, self._never or never)
        other._found = self._found
        return other

    def tracer(self, key: Hashable) -> Tracer:
        """Return the tracer of an objective."""
        if self._never:
            return Tracer(never=True)
        return self._tracers.setdefault(key, Tracer(self._images, self._never))

    def known(self, key: Hashable) -> Any:
        """Return the answer to a question, or None if it was not asked yet."""
        return self._found.get(key)

    def recall(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return the answer to a question, found out the first time."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]


class Chunks(NamedTuple):
    """How much is computed at a time.

    Attributes:
        vectors: how many vectors go through a product at a time; None: all.
        examples: how many per-example gradients are computed at a time; None: as many as vectors.
        threads: how many vectors go through products of their own at a time, if they do.
    """

    vectors: int | None = None
    examples: int | None = None
    threads: int | None = None


WHOLE = Chunks()
"""Everything at once."""


@dataclass(frozen=True)
class Execution:
    """How derivatives are computed; their values depend on it by rounding only.

    Attributes:
        abilities: the forms of derivatives that are correct.
        tracer: repeats recurring computations.
        memory: where tracers, and what was found out, are kept.
        chunks: how much is computed at a time.
    """

    abilities: Abilities = Abilities()  # noqa: RUF009 - never written to
    memory: Memory = field(default_factory=Memory, compare=False)
    tracer: Tracer = field(default_factory=lambda: Tracer(never=True), compare=False)
    chunks: Chunks = WHOLE

    @property
    def images(self) -> bool:
        """Whether images get another layout in memory."""
        return self.tracer.images

    def untraced(self) -> Execution:
        """Return the same without traces."""
        return replace(self, tracer=Tracer(never=True), memory=self.memory.beside(never=True))

    def over(self, function: Callable, in_dims: Any = 0) -> Callable:
        """Apply ``vmap``, or a plain loop if the model has an operation that ``vmap`` cannot batch.

        It is called within ``batched()``.
        """
        return vmap(function, in_dims) if self.abilities.vmap else looped(function, in_dims)

    def over_models(self, function: Callable, in_dims: Any = 0) -> Callable:
        """Do the same for many models instead of many examples."""
        return vmap(function, in_dims) if self.abilities.stacks else looped(function, in_dims)


def looped(function: Callable, in_dims: Any = 0) -> Callable:
    """Do what ``vmap`` does by a Python loop: slower, same values, for operations without a batching rule."""

    def call(*args: Any) -> Any:
        dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
        count = next(len(leaves(a)[0]) for a, dim in zip(args, dims, strict=True) if dim == 0)
        results = [
            function(*(pick(arg, i) if dim == 0 else arg for arg, dim in zip(args, dims, strict=True)))
            for i in range(count)
        ]
        return _stack(results)

    return call


def _stack(nests: list[Any]) -> Any:
    first = nests[0]
    if isinstance(first, dict):
        return {key: _stack([nest[key] for nest in nests]) for key in first}
    if isinstance(first, tuple | list):
        return type(first)(_stack([nest[i] for nest in nests]) for i in range(len(first)))
    return torch.stack(nests)
