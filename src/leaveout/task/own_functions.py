"""Lets ``torch.func`` transform a model's own ``autograd.Function`` of the old style, ``forward(ctx, ...)``.

PyTorch refuses such functions under its transforms. Their forward pass is the same with a stand-in for ``ctx`` that
notes what is saved; what is neither an input nor an output becomes a further output, without derivative, as plain
autograd treats it. Backward is the function's own. Forward-mode derivatives do not exist: products take two reverse
passes, which is slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

Place: TypeAlias = tuple[str, Any]
"""Where a saved value is found: ("input", i), ("output", i), or ("value", it) for what is no tensor."""


class Context:
    """What a function of the old style takes for its ``ctx``; attributes that it sets stay with it."""

    def __init__(self, needs: Sequence[bool], saved: Sequence[Any] = ()) -> None:
        self.needs_input_grad, self.saved_tensors = tuple(needs), tuple(saved)
        self.plain: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep values for backward."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Note outputs without derivative."""
        self.plain = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Gradients are always materialised here."""

    def mark_dirty(self, *_tensors: Tensor) -> None:
        """Refuse functions that write into their inputs."""
        raise RuntimeError("an autograd.Function that writes into its inputs cannot be transformed")


OWN = frozenset(vars(Context(())))


class Note:
    """What one call of a function saved, and where backward finds it."""

    def __init__(self) -> None:
        self.count, self.single = 0, False
        self.saved: list[Place] = []
        self.attributes: dict[str, Place] = {}
        self.plain: list[int] = []


@contextmanager
def transformable() -> Iterator[None]:
    """Within it, functions of the old style can be transformed."""
    before = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        old = cls.setup_context is Function.setup_context
        if not old or kwargs or not torch._C._are_functorch_transforms_active():
            return before.__func__(cls, *args, **kwargs)
        note = Note()
        outputs = _converted(cls).apply(note, *args)
        return outputs[0] if note.single else outputs[: note.count]

    Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        Function.apply = before  # type: ignore[method-assign]


@lru_cache(maxsize=256)
def _converted(old: type[Function]) -> type[Function]:
    """The same function with a ``setup_context``."""

    class Converted(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(note: Note, *args: Any) -> Any:
            context = Context([isinstance(arg, Tensor) for arg in args])
            result = old.forward(context, *args)
            note.single = not isinstance(result, tuple)
            outputs: list[Any] = [result] if note.single else list(result)
            note.count = len(outputs)
            note.plain = [i for i, one in enumerate(outputs) if any(one is tensor for tensor in context.plain)]

            def placed(value: Any) -> Place:
                if not isinstance(value, Tensor):
                    return "value", value
                for kind, many in (("input", args), ("output", outputs)):
                    for i, one in enumerate(many):
                        if one is value:
                            return kind, i
                outputs.append(value)
                note.plain.append(len(outputs) - 1)
                return "output", len(outputs) - 1

            note.saved = [placed(value) for value in context.saved_tensors]
            note.attributes = {name: placed(value) for name, value in vars(context).items() if name not in OWN}
            return tuple(outputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            note, *args = inputs
            places = [*note.saved, *note.attributes.values()]
            held = [{"input": args, "output": output}[kind][i] for kind, i in places if kind != "value"]
            ctx.save_for_backward(*held)
            ctx.note = note
            ctx.mark_non_differentiable(*(output[i] for i in note.plain))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            note, held = ctx.note, iter(ctx.saved_tensors)
            saved = [value if kind == "value" else next(held) for kind, value in note.saved]
            context = Context(ctx.needs_input_grad[1:], saved)
            for name, (kind, value) in note.attributes.items():
                setattr(context, name, value if kind == "value" else next(held))
            result = old.backward(context, *grads[: note.count])
            return (None, *(result if isinstance(result, tuple) else (result,)))

    Converted.__name__ = old.__name__
    return Converted
