"""Hooks on a model that can still be copied and saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class MethodHook:
    """A hook that calls a method, as long as its object exists; it does not hinder copying or saving a model.

    Copies of it do nothing.
    """

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method: Callable[[], Any] = (lambda: None) if method is None else weakref.WeakMethod(method)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the method, if its object still exists."""
        method = self._method()
        if method is not None:
            method(*args, **kwargs)

    def __reduce__(self) -> tuple:
        return MethodHook, ()
