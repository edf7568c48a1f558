"""Optimizers other than the recorded one that step during a recording, and what they move."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from leaveout.optim import unwrapped
from leaveout.run.recording.method_hook import MethodHook
from leaveout.run.seen import OTHER


class OtherOptimizers:
    """Watches the steps of all optimizers of PyTorch but one.

    Args:
        optimizer: the one that is recorded.
        params: its parameters.
        moved: called with the kind of another optimizer, and one of these parameters that it has stepped.
        note: writes down that another optimizer stepped.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: dict[str, Tensor],
        moved: Callable[[str, str], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._optimizer, self._params, self._moved = optimizer, params, moved
        self._held: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[tuple[str, Tensor]]]
        self._held = weakref.WeakKeyDictionary()
        self._note = note
        self.kind: str | None = None
        self._hook = register_optimizer_step_post_hook(MethodHook(self._stepped))

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if unwrapped(optimizer) is self._optimizer:
            return
        if optimizer not in self._held:
            own = {id(param) for group in optimizer.param_groups for param in group["params"]}
            self._held[optimizer] = [(n, p) for n, p in self._params.items() if id(p) in own]
            self.kind = type(optimizer).__name__
            self._note(OTHER, self.kind)
        name = next((name for name, param in self._held[optimizer] if param.grad is not None), None)
        if name is not None:
            self._moved(type(optimizer).__name__, name)

    def release(self) -> None:
        """Stop watching."""
        self._hook.remove()
