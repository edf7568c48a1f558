"""Intercepts calls of PyTorch functions above ``torch.func``, wherever in a forward pass they are made."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.overrides import TorchFunctionMode

GUARDS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
"""What PyTorch's Python functions check before they pass a call to a mode."""

OPENED = ("torch.nn.functional", "torch.nn.init")
"""Modules whose functions call others that a mode may want to see."""


class FunctionMode(TorchFunctionMode):
    """Replaces some functions by its handlers and leaves the others as they are.

    A mode is off while it handles a call, so an ordinary one would miss what ``F.multi_head_attention_forward`` calls.
    Here those functions of ``torch.nn.functional`` that may call a handled one run with the mode on, and those written
    in C++ are leaves. The others are left whole for modes further out. Tensors are seen as the model sees them,
    whatever transforms surround it: under ``vmap``, those of one example.
    """

    def __init__(self, handlers: dict[Any, Callable]) -> None:
        super().__init__()
        self._handlers = handlers
        self._handled = {getattr(function, "__name__", "") for function in handlers}

    def __torch_function__(
        self, function: Callable, _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self._handlers.get(function)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        inner = opened(function) if not self._handled.isdisjoint(_called(function)) else None
        if inner is None:
            return function(*args, **(kwargs or {}))
        with self:
            return inner(*args, **(kwargs or {}))


@cache
def _called(function: Any) -> frozenset[str]:
    """Return the names that a function of these modules calls, and those that its own helpers call."""
    names: set[str] = set()
    waiting, seen = [function], set()
    while waiting:
        one = waiting.pop()
        if one in seen or not isinstance(one, types.FunctionType) or one.__module__ not in OPENED:
            continue
        seen.add(one)
        names.update(one.__code__.co_names)
        helpers = [one.__globals__.get(name) for name in one.__code__.co_names]
        waiting += [each for each in helpers if isinstance(each, types.FunctionType)]
        waiting += [cell.cell_contents for cell in one.__closure__ or ()]
    return frozenset(names)


@cache
def opened(function: Any) -> Callable | None:
    """Return the function without its guards, so that it runs instead of calling the mode; None if it has none."""
    if not isinstance(function, types.FunctionType):
        return None
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    inner = [opened(value) if isinstance(value, types.FunctionType) else None for value in cells]
    if not any(inner) and not set(GUARDS) & set(function.__code__.co_names):
        return None
    names = {**function.__globals__, **dict.fromkeys(GUARDS, _never)}
    closure = tuple(types.CellType(opened or value) for opened, value in zip(inner, cells, strict=True))
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _never(*_: Any) -> bool:
    return False
