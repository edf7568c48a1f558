"""Lets ``torch.func`` transform a custom ``autograd.Function``: of the old style, or one that writes to its inputs.

PyTorch refuses functions of the old style, ``forward(ctx, ...)``, under its transforms. Here their forward pass runs
with a substitute for ``ctx`` that notes what is saved; a saved tensor that is neither an input nor an output becomes an
extra output without derivative, as plain autograd treats it. Backward is the function's own. There are no forward-mode
derivatives: products take two reverse passes, which is slower.

A function that writes to an input (``mark_dirty``) is given a copy of it, and what it wrote is copied back: without the
in-place write it is a function like any other. Checkpointed layers are called without checkpointing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import local
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd import function as function_module
from torch.utils import checkpoint

from leaveout._util.patching import Patch

Place: TypeAlias = tuple[str, Any]
"""Where a saved value is found: ("input", i), ("output", i), or ("value", it) for a value that is not a tensor."""


class Context:
    """The substitute for ``ctx`` that a function of the old style gets; it keeps the attributes that are set on it."""

    def __init__(self, needs: Sequence[bool], saved: Sequence[Any] = ()) -> None:
        self.needs_input_grad, self.saved_tensors = tuple(needs), tuple(saved)
        self.plain: tuple[Tensor, ...] = ()
        self.written: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep values for backward."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Note outputs without derivative."""
        self.plain = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: gradients are always materialised here."""

    def save_for_forward(self, *_tensors: Any) -> None:
        """Do nothing: there are no forward-mode derivatives here."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Note inputs that were written to."""
        self.written = tensors


OWN = frozenset(vars(Context(())))


class Note:
    """What one call of a function returned and saved, and where backward finds it."""

    def __init__(self) -> None:
        self.count, self.single = 0, False
        self.saved: list[Place] = []
        self.attributes: dict[str, Place] = {}
        self.plain: list[int] = []
        self.written: dict[int, int] = {}  # the input that an output overwrites

    def take(self, context: Context, args: Sequence[Any], result: Any, *, may_write: bool) -> tuple[Any, ...]:
        """Note a call; return its outputs, with saved tensors that are neither inputs nor outputs added to them."""
        self.single = not isinstance(result, tuple)
        outputs: list[Any] = [result] if self.single else list(result)
        self.count = len(outputs)
        self.plain = [i for i, output in enumerate(outputs) if _place(output, context.plain) is not None]
        written = [i for i, arg in enumerate(args) if _place(arg, context.written) is not None]
        self.written = {k: i for k, output in enumerate(outputs) for i in written if output is args[i]}
        if written and not (may_write and len(self.written) == len(written)):
            raise RuntimeError("an autograd.Function writes into an input in a way that cannot be followed")
        self.saved = [self._placed(value, context, args, outputs) for value in context.saved_tensors]
        attributes = {name: value for name, value in vars(context).items() if name not in OWN}
        self.attributes = {name: self._placed(value, context, args, outputs) for name, value in attributes.items()}
        return tuple(outputs)

    def _placed(self, value: Any, context: Context, args: Sequence[Any], outputs: list[Any]) -> Place:
        """Say where a saved value is found; a tensor that is nowhere yet becomes a further output."""
        if not isinstance(value, Tensor):
            return "value", value
        among_inputs, among_outputs = _place(value, args), _place(value, outputs)
        was_written = _place(value, context.written) is not None  # then what it holds now is the output
        if among_inputs is not None and not (was_written and among_outputs is not None):
            return "input", among_inputs
        if among_outputs is None:
            outputs.append(value)
            among_outputs = len(outputs) - 1
            self.plain.append(among_outputs)
        return "output", among_outputs


def _place(value: Any, values: Sequence[Any]) -> int | None:
    """Return the position of this very object; None if it is not there."""
    return next((i for i, other in enumerate(values) if other is value), None)


class _Defined:
    """Stands for ``Function.setup_context`` so that functions of the old style pass as ones that override it.

    ``apply`` itself is not replaced: a model may hold ``Square.apply`` under another name. Whatever its name, it asks
    for the class's ``setup_context``, binds the arguments of ``forward``, and calls ``custom_function_call``.
    """

    def __get__(self, _instance: Any, function: type[Function]) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return BASE
        ASKED.forward = function.forward
        return self


def _bound(forward: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Bind arguments as PyTorch does; a forward pass of the old style has ``ctx`` before them."""
    is_old = vars(ASKED).pop("forward", None) is forward
    bound = inspect.signature(forward).bind(*[None] * is_old, *args, **(kwargs or {}))
    bound.apply_defaults()
    return bound.args[is_old:], bound.kwargs


class _Binding:
    """Stands for ``inspect`` where ``Function.apply`` is written in Python (up to PyTorch 2.13)."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    signature = classmethod(lambda cls, forward: cls(forward))

    def bind(self, *args: Any, **kwargs: Any) -> _Binding:
        """Return itself, with bound arguments."""
        self.args, self.kwargs = _bound(self._forward, args, kwargs)
        return self

    def apply_defaults(self) -> None:
        """Do nothing: they are applied."""


BASE, ASKED = function_module._SingleLevelFunction.setup_context, local()
CALL = function_module.custom_function_call
BIND = next(name for name in ("_bind_default_args", "inspect") if hasattr(function_module, name))
BINDS = getattr(function_module, BIND)
RECOMPUTE = "_checkpoint_without_reentrant_generator"
RECOMPUTE = next(name for name in (f"{RECOMPUTE}_impl", RECOMPUTE) if hasattr(checkpoint, name))
RECOMPUTED = getattr(checkpoint, RECOMPUTE)


def _put(inside: bool) -> None:
    function_module.custom_function_call = _called if inside else CALL  # type: ignore[assignment]
    setattr(function_module, BIND, (_Binding if BIND == "inspect" else _bound) if inside else BINDS)
    setattr(checkpoint, RECOMPUTE, _once if inside else RECOMPUTED)
    if inside:
        Function.setup_context = _Defined()  # type: ignore[assignment, method-assign]
        checkpoint.CheckpointFunction.apply = _called_at_once  # type: ignore[method-assign]
    elif "setup_context" in vars(Function):
        del Function.setup_context, checkpoint.CheckpointFunction.apply


transformable = Patch(_put).inside
"""A context that makes functions of the old style, functions that write to inputs, and checkpoints transformable."""


@contextmanager
def calls() -> Iterator[list[tuple[type[Function], tuple]]]:
    """Yield a list of the functions that are called in this context under a transform, with their arguments."""
    made: list[tuple[type[Function], tuple]] = []
    ASKED.made = made
    try:
        yield made
    finally:
        del ASKED.made


def _called(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    if hasattr(ASKED, "made") and not cls.__module__.startswith("leaveout."):
        ASKED.made.append((cls, tuple(map(_unwrapped, args))))
    if not (_is_old(cls) or _writes(cls)):
        return CALL(cls, *args, **kwargs)
    note = Note()
    outputs = list(_converted(cls).apply(note, *args))[: note.count]
    for place, i in note.written.items():
        outputs[place] = args[i].copy_(outputs[place])
    return outputs[0] if note.single else tuple(outputs)


def _unwrapped(value: Any) -> Any:
    """Return a copy of the tensor inside all transforms."""
    if not isinstance(value, Tensor):
        return value
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value.detach().clone()


def _called_at_once(function: Any, _preserve: bool, *inputs: Any) -> Any:  # torch.autograd.grad does not support it
    return function(*inputs)


def _once(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    """Wrap a checkpointed layer without recomputing it: in the backward pass, the weights given are no longer there."""
    yield


@lru_cache(maxsize=256)
def _is_old(function: type[Function]) -> bool:
    kinds = function.__mro__[: function.__mro__.index(Function)]
    return not any("setup_context" in vars(kind) for kind in kinds)


@lru_cache(maxsize=256)
def _writes(function: type[Function]) -> bool:
    """Say whether a function's code mentions ``mark_dirty``."""
    parts = [inspect.unwrap(part) for part in (function.forward, function.setup_context)]
    return any("mark_dirty" in part.__code__.co_names for part in parts if hasattr(part, "__code__"))


def _forward(function: type[Function], context: Context, args: Sequence[Any]) -> Any:
    """Call the forward pass of a function of either style."""
    if _is_old(function):
        return function.forward(context, *args)
    result = function.forward(*args)
    function.setup_context(context, tuple(args), result)
    return result


@lru_cache(maxsize=256)
def _converted(old: type[Function]) -> type[Function]:
    """Return the same function with a ``setup_context`` and without in-place writes."""

    class Converted(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(note: Note, *args: Any) -> Any:
            context = Context([isinstance(arg, Tensor) for arg in args])
            args = tuple(arg.clone() if isinstance(arg, Tensor) and _writes(old) else arg for arg in args)
            result = _forward(old, context, args)
            return note.take(context, args, result, may_write=_writes(old))

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
