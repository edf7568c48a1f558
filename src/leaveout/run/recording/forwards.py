"""What is recorded about a model's forward passes in training: modes, and the random generators before them.

A pass that draws random numbers (dropout) can be repeated exactly from the generators' states before it. The states
are kept only if the pass changed them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from leaveout._util.generators import RandomState, is_aside, random_state
from leaveout._util.wrappers import bare, casts_itself
from leaveout.run.recording.method_hook import MethodHook

_TRAINING = attrgetter("training")


@dataclass
class Pass:
    """One forward pass with gradients.

    Attributes:
        place: how many batches had been drawn since the last step.
        random: the generators' states before it.
        training: the modules in training mode, by name.
        autocast: the dtype that operations were cast to (``torch.autocast``); None without autocast.
        drew: whether the pass changed the generators.
    """

    place: int
    random: RandomState
    training: tuple[str, ...]
    autocast: str | None = None
    drew: bool = False


class Forwards:
    """The forward passes since the last step, seen through hooks on the model; passes without gradients do not count.

    Args:
        model: the model that is trained.
        drawn: returns how many batches were drawn since the last step.
        before_first: called before the first pass since the last step.
        before_later: called before each later pass.
    """

    def __init__(
        self,
        model: nn.Module,
        drawn: Callable[[], int],
        before_first: Callable[[], None],
        before_later: Callable[[], None],
    ) -> None:
        self._named = list(bare(model).named_modules())
        self._drawn, self._before_first, self._before_later = drawn, before_first, before_later
        self._kind = next((tensor.device.type for tensor in model.parameters()), "cpu")
        self._devices = {str(tensor.device) for tensor in model.parameters()} - {"cpu"}
        self._modules = [module for _, module in self._named]
        self._modes: list[bool] = []
        self._training: tuple[str, ...] = ()
        self.passes: list[Pass] = []
        self.aside = False
        """Whether the model was called without gradients while a batch waited for its step."""
        self._within: str | None = None
        self._hooks = [
            model.register_forward_pre_hook(MethodHook(self._before)),
            model.register_forward_hook(MethodHook(self._after)),
        ]
        parts = list(model.modules())[1:] if casts_itself(model) else []
        self._inner = [part.register_forward_pre_hook(MethodHook(self._inside)) for part in parts]

    def state(self) -> RandomState:
        """Return the generators' current states."""
        return random_state(*self._devices)

    def training(self) -> tuple[str, ...]:
        """Return the names of the modules in training mode; computed again only if a mode changed."""
        modes = list(map(_TRAINING, self._modules))
        if modes != self._modes:
            self._modes, self._training = modes, tuple(name for name, module in self._named if module.training)
        return self._training

    def _autocast(self) -> str | None:
        kind = self._kind
        on = torch.is_autocast_enabled(kind)
        return str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if on else None

    def _before(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self.aside = self.aside or (not is_aside() and self._drawn() > 0)
        elif not is_aside():
            if self.passes:
                self._before_later()
            if not self.passes:
                self._before_first()
            self.passes.append(Pass(self._drawn(), self.state(), self.training(), self._within or self._autocast()))

    def _inside(self, *_: Any) -> None:
        """Note the dtype if autocasting begins inside the model; once is enough."""
        if torch.is_grad_enabled() and self.passes and self._inner:
            self._within = self.passes[-1].autocast = self._autocast()

    def _after(self, *_: Any) -> None:
        if torch.is_grad_enabled() and self.passes and not is_aside():
            before, now = self.passes[-1].random, self.state()
            self.passes[-1].drew = not all(torch.equal(before[name], now[name]) for name in before)
            while self._inner:
                self._inner.pop().remove()

    def of_batches(self, count: int) -> list[list[Pass]]:
        """Return the passes of each of the batches drawn since the last step.

        If each batch was drawn just before its pass, the number of batches drawn by then identifies it; if all were
        drawn first, or are named only now, passes and batches come in the same order.
        """
        if count == 1:
            return [[one for one in self.passes if one.place] or self.passes]
        own: list[list[Pass]] = [[one for one in self.passes if one.place == i + 1] for i in range(count)]
        if sum(map(bool, own)) <= 1 < len(self.passes) == count:
            return [[one] for one in self.passes]
        return own

    def clear(self) -> None:
        """Start over after a step."""
        self.passes = []

    def release(self) -> None:
        """Remove all hooks from the model."""
        for hook in (*self._hooks, *self._inner):
            hook.remove()
        self._hooks = self._inner = []


def random_of(passes: Sequence[Pass]) -> RandomState | None:
    """Return the generators' states before a batch's first pass; None if none of its passes drew random numbers.

    >>> random_of([Pass(1, {}, ())]) is None
    True
    """
    return passes[0].random if any(one.drew for one in passes) else None
