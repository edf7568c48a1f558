"""The state after the last step, whatever happens to the model between steps and before the recording is finished.

Copying it after every step would cost as much as keeping all states. Three cheap facts are used instead: the state may
have been kept anyway; a hook runs before ``load_state_dict`` writes, when there is still time for a copy; and every
tensor counts the in-place changes made to it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from leaveout._util.trees import State
from leaveout.run.recording.live_model import Piece, are_small, joined, together
from leaveout.run.recording.method_hook import MethodHook

_VERSION = attrgetter("_version")


class LastState:
    """Knows whether the parameters are still as the last step left them, and if not, what they were.

    Args:
        model: the model that is trained.
        optimizer: its optimizer.
        params: the parameters that are trained.
        copied: returns a copy of the state.
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
        self._first: list[int] | None = None
        self._total = torch.zeros(())
        self._state: State | None = None
        hook = MethodHook(self.keep_copy)
        self._hooks: list[Any] = [optimizer.register_load_state_dict_pre_hook(hook)]
        self._hooks += [module.register_load_state_dict_pre_hook(hook) for module in model.modules()]

    def total(self) -> tuple[Tensor, list[Piece]]:
        """Return the sum of the parameters' norms: finite only if all are, and rarely the same after a change.

        For small parameters the norms are those of flat copies of several parameters, which are returned as well.
        """
        with torch.no_grad():
            pieces = [joined(part) for part in self._parts]
            if len(pieces) == 1:  # in one call, as most small models are
                return torch.linalg.vector_norm(pieces[0].copy), pieces
            of = [piece.copy for piece in pieces] or self._params
            return torch.stack(torch._foreach_norm(of)).sum(), pieces

    def note(self, total: Tensor, state: State | None) -> None:
        """Note that a step was taken; ``state`` is a copy of the state after it, if there is one."""
        self._versions = self._counted()
        self._total, self._state = total, state

    def keep_copy(self, *_: Any) -> None:
        """Copy the state before something writes to it, unless there is a copy already or it is too late."""
        if self._versions is not None and self._state is None and self._counted() == self._versions:
            self._state = self._copied()

    def changed(self) -> bool:
        """Say whether the parameters were written to since the last step and now have different values."""
        return self._versions not in (None, self._counted()) and not torch.equal(self.total()[0], self._total)

    def drifts(self) -> bool:
        """Return whether the parameters were written to since the last step, or since the first call before it."""
        if self._versions is None:
            self._first = self._first or self._counted()
            return self._counted() != self._first
        return self.changed()

    def final(self) -> State | None:
        """Return the state after the last step; None if it was overwritten."""
        if self._state is not None:
            return self._state
        now, _ = self.total()
        if self._versions is None or now.device != self._total.device:
            return self._copied()
        # The second test catches writes through param.data, which are not counted.
        gone = self.changed() or bool((now - self._total).abs() > 4 * torch.finfo(now.dtype).eps * self._total)
        return None if gone else self._copied()

    def release(self) -> None:
        """Remove all hooks from the model and the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _counted(self) -> list[int]:
        return list(map(_VERSION, self._params))
