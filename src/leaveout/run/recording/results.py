"""What the model returned in the step before: a batch that holds some of it depends on the parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from leaveout.run.recording.first_pass import tensors_of
from leaveout.run.recording.method_hook import MethodHook
from leaveout.task import batches


class Results:
    """Remembers where the outputs of a step are in memory, without holding them; off until the first question.

    Args:
        model: the model that is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._now: list[StorageWeakRef] = []
        self._before: list[StorageWeakRef] = []
        self._model = model
        self._hook: Any = None

    def sign(self, batch: Any) -> str | None:
        """Return what shows that a batch depends on the parameters, in words; None if nothing does."""
        if self._hook is None:
            self._hook = self._model.register_forward_hook(MethodHook(self._after))
        tensors = [leaf for leaf in batches.leaves(batch) if isinstance(leaf, Tensor)]
        if any(tensor.grad_fn is not None for tensor in tensors):
            return "a tensor with a gradient history"
        known = {ref.cdata for ref in self._before if not ref.expired()}
        if any(tensor.untyped_storage()._cdata in known for tensor in tensors):
            return "what the model returned in the step before (a carried state)"
        return None

    def turn(self) -> None:
        """Begin the next step."""
        self._before, self._now = self._now, []

    def release(self) -> None:
        """Remove the hook from the model."""
        if self._hook is not None:
            self._hook.remove()

    def _after(self, _model: nn.Module, _args: tuple, outputs: Any) -> None:
        self._now += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_of(outputs)]
