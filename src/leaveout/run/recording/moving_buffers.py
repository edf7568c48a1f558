"""The buffers that training changes, such as BatchNorm's running statistics: which they are, and their values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leaveout._util.tensor_bytes import tensor_bytes
from leaveout._util.trees import Params
from leaveout.errors import UnsupportedError
from leaveout.task.modules import COUNT


class MovingBuffers:
    """Watches a model's buffers until its first step, and says which of them that step changed.

    Values, including counts, are stored in the dtype of the model's parameters, so that they are part of the state
    like any other number.

    Args:
        model: the model that is trained.
        names: the moving buffers, if they are known from a run that is being resumed.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...] | None = None) -> None:
        self._buffers = dict(model.named_buffers())
        self._dtype = next((p.dtype for p in model.parameters()), torch.float32)
        self._before = self._copied(self._buffers)
        self._names = names
        self._versions: dict[str, int] = {}
        self._at_pass: list[int] = []
        self._settled: Params | None = None

    def begin(self) -> None:
        """Note the buffers before the first pass since a step; until the first step, their values are the initial."""
        self._at_pass = self._counted()
        if self._names is None:
            self._before = self._copied(self._buffers)

    def decide(self) -> dict[str, list[int]]:
        """Return which buffers the first step's forward passes have changed, with their shapes."""
        if self._names is None:
            now = self._copied(self._buffers)
            moved = {name for name in now if not torch.equal(now[name], self._before[name])}
            # With momentum=0, BatchNorm moves the count of its batches alone; its statistics belong to it.
            counting = {_module(name) for name in moved if name.endswith(COUNT)}
            self._names = tuple(name for name in now if name in moved or _module(name) in counting)
        self._versions = {name: b._version for name, b in self._buffers.items() if name not in self._names}
        return {name: list(self._buffers[name].shape) for name in self._names}

    def start(self) -> Params:
        """Return the moving buffers before the first step."""
        return {name: self._before[name] for name in self._names or ()}

    @property
    def passed(self) -> bool:
        """Say whether forward passes since the last step wrote to buffers."""
        return self._at_pass != self._counted()

    def settle(self) -> None:
        """Note that a step was taken: what later passes do to the buffers belongs to the next one."""
        self._settled = self._copied({name: self._buffers[name] for name in self._names or ()})

    def now(self) -> Params:
        """Return copies of the moving buffers as the last step left them, or as they are if there was none."""
        if self._settled is not None:
            return dict(self._settled)
        return self._copied({name: self._buffers[name] for name in self._names or ()})

    def check(self, where: str) -> None:
        """Refuse a buffer that changes only after the first step."""
        for name, version in self._versions.items():
            buffer = self._buffers[name]
            if buffer._version != version:
                self._versions[name] = buffer._version
                if not torch.equal(self._copied({name: buffer})[name], self._before[name]):
                    raise UnsupportedError(
                        f"{where}, the buffer {name!r} has changed, which it had not in the first step: set its module "
                        "to training mode from the start, or finish() here and record what follows as another run.",
                        code="buffer-moved-late",
                    )

    def check_skipped(self) -> None:
        """Refuse to skip a batch whose forward pass may have changed buffers: that change would belong to no step."""
        if self._names:
            raise UnsupportedError(
                f"A batch was skipped after its forward pass, which moves {self._names[0]!r}: skip it before the model "
                "is called (leave it out of the data), or record what follows as another run.",
                code="skipped-batch-moves-buffers",
            )

    def _counted(self) -> list[int]:
        return [buffer._version for buffer in self._buffers.values()]

    def _copied(self, buffers: dict[str, Tensor]) -> Params:
        # A sparse one, such as a graph, is only compared: PyTorch has no equality for it.
        return {
            name: buffer.detach().to("cpu", self._dtype, copy=True)
            if buffer.layout is torch.strided
            else torch.from_numpy(tensor_bytes(buffer).copy())
            for name, buffer in buffers.items()
        }


def _module(buffer: str) -> str:
    """Return the name of the module that holds a buffer.

    >>> _module("body.norm.running_mean"), _module("running_mean")
    ('body.norm', '')
    """
    return buffer.rpartition(".")[0]
