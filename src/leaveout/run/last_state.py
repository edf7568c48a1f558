"""The state after the last step, whatever becomes of the model between steps and before the recording is finished.

Copying it after every step would cost as much as keeping all states. Instead three things are looked at, none of which
costs: the state was kept anyway; ``load_state_dict`` says when it is about to write, and then there is time for a copy;
and every tensor counts the changes made to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from leaveout._util.trees import State
from leaveout.run.live_model import Piece, are_small, joined, together

_VERSION = attrgetter("_version")


class LastState:
    """Knows whether parameters are still as the last step left them, and what they were where they are not.

    Args:
        model: what is trained.
        optimizer: what trains it.
        params: the parameters that are trained.
        copied: makes a copy of the state.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        params: dict[str, Tensor],
        copied: Callable[[], State],
    ) -> None:
        self._params, self._copied = list(params.values()), copied
        self._parts = together(self._params) if are_small(self._params) else []
        self._versions: list[int] | None = None
        self._total = torch.zeros(())
        self._state: State | None = None
        hook = _BeforeLoading(self)
        self._hooks: list[Any] = [optimizer.register_load_state_dict_pre_hook(hook)]
        self._hooks += [module.register_load_state_dict_pre_hook(hook) for module in model.modules()]

    def total(self) -> tuple[Tensor, list[Piece]]:
        """The parameters' norm, or the sum of their norms: finite only if all are, rarely the same after a change.

        Of small parameters it is taken of copies in few pieces, which are returned as well.
        """
        with torch.no_grad():
            pieces = [joined(part) for part in self._parts]
            of = [piece.copy for piece in pieces] or self._params
            return torch.stack(torch._foreach_norm(of)).sum(), pieces

    def note(self, total: Tensor, state: State | None) -> None:
        """A step was taken; ``state`` is a copy of what it led to, if there is one."""
        self._versions = self._counted()
        self._total, self._state = total, state

    def keep_copy(self) -> None:
        """Something is about to write: copies the state, unless there is a copy or it is too late."""
        if self._versions is not None and self._state is None and self._counted() == self._versions:
            self._state = self._copied()

    def changed(self) -> bool:
        """Say whether the parameters were written to since the last step, and are not as they were."""
        return self._versions not in (None, self._counted()) and not torch.equal(self.total()[0], self._total)

    def final(self) -> State | None:
        """The state after the last step; None where it is gone."""
        if self._state is not None:
            return self._state
        now, _ = self.total()
        if self._versions is None or now.device != self._total.device:
            return self._copied()
        # The second is for those who write past the count, by param.data.
        gone = self.changed() or bool((now - self._total).abs() > 4 * torch.finfo(now.dtype).eps * self._total)
        return None if gone else self._copied()

    def release(self) -> None:
        """Let go of model and optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _counted(self) -> list[int]:
        return list(map(_VERSION, self._params))


class _BeforeLoading:
    """A hook that a model can be copied and saved with: its copies do nothing."""

    def __init__(self, last: LastState | None = None) -> None:
        self._last = (lambda: None) if last is None else weakref.ref(last)

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        last = self._last()
        if last is not None:
            last.keep_copy()

    def __reduce__(self) -> tuple:
        return _BeforeLoading, ()
