"""The averaged model (EMA, SWA) during recording: what each of its updates did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from leaveout._util.trees import State
from leaveout._util.wrappers import bare
from leaveout.errors import InputError, UnsupportedError
from leaveout.optim.averaging import AVERAGE, Update

if TYPE_CHECKING:
    from leaveout.run.reader import Run


class LiveAverage:
    """Follows an averaged model: ``updates`` returns the combined effect of its updates since the last step.

    Args:
        average: the loop's ``AveragedModel``, or the decay of an average that the loop computes itself:
            ``ema ← decay·ema + (1 − decay)·θ`` after every step, starting from the weights before the first.
        model: the model that is trained.
    """

    def __init__(self, average: AveragedModel | float, model: nn.Module) -> None:
        self._updates_itself = not isinstance(average, nn.Module)
        if isinstance(average, nn.Module) and not isinstance(average, AveragedModel):
            raise InputError(
                f"average= is a {type(average).__name__}: give a torch.optim.swa_utils.AveragedModel, or the decay.",
                code="average-unknown",
            )
        if isinstance(average, AveragedModel):
            self._averaged = average
        else:
            if not 0 <= average < 1:
                raise InputError(
                    f"average={average!r} is not a decay: give a number from 0 to below 1.", code="average-unknown"
                )
            self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(average))
            self._averaged.n_averaged.fill_(1)  # so that the average includes the weights before the first step
        self._model = model
        self._tensors = dict(bare(self._averaged.module).named_parameters())
        self._buffers = {n: b for n, b in bare(self._averaged.module).named_buffers() if b.is_floating_point()}
        self._seen = self._count()
        self._names: list[str] = list(self._tensors)
        self._update(1)  # refuses, before anything is recorded, an average that is not a weighted mean

    def follow(self, params: Iterable[str], moving: dict[str, list[int]]) -> dict[str, list[int]]:
        """Follow these parameters and those moving buffers that are averaged; return the shapes of these buffers."""
        buffers = {name: shape for name, shape in moving.items() if name in self._buffers}
        self._names = [*params, *buffers]
        return buffers

    def stepped(self) -> None:
        """Update the average after a step if only the decay was given; otherwise the loop updates it."""
        if self._updates_itself:
            self._averaged.update_parameters(self._model)

    def updates(self, *, first: bool = False) -> Update | None:
        """Return the combined effect of the updates since the last step; with ``first``, start counting here."""
        if first:
            self._seen = self._count()
        now, combined = self._count(), Update(models=self._seen)
        if now < self._seen:
            raise UnsupportedError(
                "The averaged model was reset during training: record what follows as another run.",
                code="average-begun-anew",
            )
        for count in range(self._seen, now):
            combined = combined.then(self._update(count))
        self._seen = now
        return combined

    def state(self) -> State:
        """Return a copy of the current average, as a slot of the state."""
        tensors = self._tensors | self._buffers
        return {AVERAGE: {name: tensors[name].detach().to("cpu", copy=True).contiguous() for name in self._names}}

    def restore(self, run: Run) -> None:
        """Put the average back to what it was after the run's last step."""
        tensors, average = self._tensors | self._buffers, run.final()[AVERAGE]
        last = run.written(len(run) - 1).average
        self._names = list(average)
        with torch.no_grad():
            for name, tensor in average.items():
                tensors[name].copy_(tensor)
            if last is not None:
                self._averaged.n_averaged.fill_(int(last.models))
        self._seen = self._count()

    def _count(self) -> int:
        return int(self._averaged.n_averaged)

    def _update(self, count: int) -> Update:
        """Return the effect of the update made when ``count`` models were averaged, measured on four test values."""
        if count == 0:
            return Update(0.0, 1.0, 0.0, 1.0, 1)
        old = torch.tensor([1.0, 0.0, 1.0, 3.0], dtype=torch.float64)
        new = torch.tensor([0.0, 1.0, 1.0, 5.0], dtype=torch.float64)
        number = torch.tensor(count)
        kept, added, *others = self._applied(old, new, number).tolist()
        expected = [kept + added, 3 * kept + 5 * added]
        if any(abs(one - other) > 1e-6 for one, other in zip(others, expected, strict=True)):
            raise UnsupportedError(
                "The averaging function is not a weighted mean of the average and the weights: use "
                "get_ema_multi_avg_fn or get_swa_multi_avg_fn of torch.optim.swa_utils, or leave average= out.",
                code="average-not-linear",
            )
        buffers = (kept, added) if self._averaged.use_buffers else (0.0, 1.0)
        return Update(kept, added, buffers[0], buffers[1], count + 1)

    def _applied(self, old: Tensor, new: Tensor, number: Tensor) -> Tensor:
        averaged = self._averaged
        if averaged.multi_avg_fn is not None:
            averaged.multi_avg_fn([old], [new], number)
            return old
        if averaged.avg_fn is not None:
            return torch.as_tensor(averaged.avg_fn(old, new, number))
        return old + (new - old) / (number + 1)


class NoAverage:
    """Replaces the average in a recording without one."""

    def follow(self, params: Iterable[str], moving: dict[str, list[int]]) -> dict[str, list[int]]:  # noqa: ARG002
        """Return no buffers: none is averaged."""
        return {}

    def stepped(self) -> None:
        """Do nothing: there is no average to update."""

    def updates(self, *, first: bool = False) -> Update | None:  # noqa: ARG002
        """Return None: there is no average to update."""
        return None

    def state(self) -> State:
        """Return no slot."""
        return {}

    def restore(self, run: Run) -> None:
        """Do nothing: the run has no average either."""
