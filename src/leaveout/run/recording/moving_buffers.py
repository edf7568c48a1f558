"""The buffers that training changes, such as BatchNorm's running statistics: which they are, and their values.

A module may write to a buffer in place or put another tensor in its place; both count as a change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from leaveout._util.tensor_bytes import tensor_bytes
from leaveout._util.trees import Params
from leaveout.errors import UnsupportedError
from leaveout.task.modules import COUNT

if TYPE_CHECKING:
    from leaveout.run.reader import Run


class MovingBuffers:
    """Watches a model's buffers until its first step, and says which of them that step changed.

    BatchNorm's statistics move too if they rest in the first step while parameters that are recorded are frozen: the
    loop trains a part first and will train the rest, with its BatchNorm.

    Values, including counts, are stored in the dtype of the model's parameters, so that they are part of the state
    like any other number.

    Args:
        model: the model that is trained.
        params: the parameters that are recorded.
        before: the run that is being resumed, if any.
    """

    def __init__(self, model: nn.Module, params: Params, before: Run | None = None) -> None:
        self._model, self._params = model, params
        self._dtype = next((p.dtype for p in model.parameters()), torch.float32)
        self._look()
        self._before = self._copied(self._buffers())
        self._names = None if before is None else tuple(before.manifest.buffers)
        self._versions: dict[str, _Version] = {}
        self._at_pass: dict[str, _Version] = {}
        self._settled: Params | None = None

    def begin(self) -> None:
        """Note the buffers before the first pass since a step; until the first step, their values are the initial."""
        self._at_pass = self._written()
        if self._names is None:
            self._before = self._copied(self._buffers())

    def decide(self) -> dict[str, list[int]]:
        """Return which buffers the first step's forward passes have changed, with their shapes.

        One that they made or resized, such as a table of positions that grows, is a constant unless it changes again.
        """
        self._look()
        now = self._copied(self._buffers())
        if self._names is None:
            kept = [name for name in now if name in self._before and now[name].shape == self._before[name].shape]
            moved = {name for name in kept if not torch.equal(now[name], self._before[name])} | self._resting(kept)
            # With momentum=0, BatchNorm moves the count of its batches alone; its statistics belong to it.
            counting = {_module(name) for name in moved if name.endswith(COUNT)}
            self._names = tuple(name for name in kept if name in moved or _module(name) in counting)
        self._before = {**now, **{name: self._before[name] for name in self._names}}
        self._versions = {name: at for name, at in self._written().items() if name not in self._names}
        return {name: list(now[name].shape) for name in self._names}

    def _resting(self, buffers: list[str]) -> set[str]:
        """Return the statistics that will move when what is frozen is trained."""
        if all(param.requires_grad for param in self._params.values()):
            return set()
        norms = [n for n, one in self._model.named_modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
        return {name for name in buffers if _module(name) in norms}

    def start(self) -> Params:
        """Return the moving buffers before the first step."""
        return {name: self._before[name] for name in self._names or ()}

    @property
    def passed(self) -> bool:
        """Say whether forward passes since the last step wrote to buffers."""
        return _differ(self._at_pass, self._written())

    def settle(self) -> None:
        """Note that a step was taken: what later passes do to the buffers belongs to the next one."""
        self._settled = self._moving()

    def now(self) -> Params:
        """Return copies of the moving buffers as the last step left them, or as they are if there was none."""
        return self._moving() if self._settled is None else dict(self._settled)

    def check(self, where: str) -> None:
        """Refuse a buffer that changes only after the first step, or one that changes its shape."""
        if self._names is None:
            return
        now = self._buffers()
        for name in self._names:
            if name not in now or now[name].shape != self._before[name].shape:
                shape = list(now[name].shape) if name in now else None
                raise UnsupportedError(
                    f"{where}, the buffer {name!r} has the shape {shape} instead of {list(self._before[name].shape)}: "
                    "let it have one shape throughout (with a row for each example of a batch, by drop_last=True).",
                    code="buffer-resized",
                )
        for name, version in self._versions.items():
            if name in now and not version.is_of(now[name]):
                self._versions[name] = _Version(now[name], now[name]._version)
                if not torch.equal(self._copied({name: now[name]})[name], self._before[name]):
                    raise UnsupportedError(
                        f"{where}, the buffer {name!r} has changed, which it had not in the first step: set its module "
                        "to training mode from the start, give it its shape before training, or finish() here and "
                        "record what follows as another run.",
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

    def _look(self) -> None:
        """Find where the buffers are; modules may put other tensors there."""
        self._places = []
        for name, _ in self._model.named_buffers():
            module, _, key = name.rpartition(".")
            self._places.append((name, self._model.get_submodule(module)._buffers, key))

    def _buffers(self) -> dict[str, Tensor]:
        found = ((name, table.get(key)) for name, table, key in self._places)
        return {name: buffer for name, buffer in found if buffer is not None}

    def _written(self) -> dict[str, _Version]:
        return {name: _Version(buffer, buffer._version) for name, buffer in self._buffers().items()}

    def _moving(self) -> Params:
        now = self._buffers()
        return self._copied({name: now[name] for name in self._names or ()})

    def _copied(self, buffers: dict[str, Tensor]) -> Params:
        # A sparse one, such as a graph, is only compared: PyTorch has no equality for it.
        return {
            name: buffer.detach().to("cpu", self._dtype, copy=True)
            if buffer.layout is torch.strided
            else torch.from_numpy(tensor_bytes(buffer).copy())
            for name, buffer in buffers.items()
        }


class _Version(NamedTuple):
    """A tensor, and how often it was written to."""

    tensor: Tensor
    writes: int

    def is_of(self, tensor: Tensor) -> bool:
        """Say whether a buffer is this tensor, not written to since."""
        return tensor is self.tensor and tensor._version == self.writes


def _differ(before: dict[str, _Version], now: dict[str, _Version]) -> bool:
    return len(before) != len(now) or any(not before[n].is_of(at.tensor) for n, at in now.items() if n in before)


def _module(buffer: str) -> str:
    """Return the name of the module that holds a buffer.

    >>> _module("body.norm.running_mean"), _module("running_mean")
    ('body.norm', '')
    """
    return buffer.rpartition(".")[0]
