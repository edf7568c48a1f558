"""Resuming a run that was cut short: restores model and optimizer, and skips the batches that are done."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leaveout._util.generators import set_random_state
from leaveout._util.trees import PARAM, State
from leaveout.errors import MismatchError
from leaveout.optim import AVERAGE, IDLE, STILL, Hyper, Rule
from leaveout.run.model_match import check_model
from leaveout.run.record import Record
from leaveout.task import batches

if TYPE_CHECKING:
    from leaveout.run.reader import Run


def check_trained_alike(run: Run, model: nn.Module, params: dict[str, Tensor], rule: Rule) -> None:
    """Refuse to resume a run with another model or optimizer, or with an average of the weights in only one of them."""
    averaged = AVERAGE in rule.slots
    if averaged != (AVERAGE in run.manifest.rule.slots):
        raise MismatchError(
            f"The run in {run.path} was started {'without' if averaged else 'with'} average=: continue it in the same "
            "way.",
            code="average-differs",
        )
    if rule != run.manifest.rule:
        raise MismatchError(
            f"The run in {run.path} was trained by {run.rule.kind} with other parameter groups or buffers than this "
            f"{rule.kind} has: build model and optimizer as they were.",
            code="optimizer-differs",
        )
    check_model(run.manifest, model, params)


def check_restored(run: Run, state: State) -> None:
    """Refuse to resume from a checkpoint that is not the run's last state, bit for bit."""
    there = run.final()
    differing = [
        (slot, name) for slot in there for name in there[slot] if not torch.equal(there[slot][name], state[slot][name])
    ]
    if differing:
        slot, name = differing[0]
        raise MismatchError(
            f"The training continues from step {len(run)} with another {slot!r} of {name!r} than the run in {run.path} "
            "has after that step: load the checkpoint that was saved in that training, or record into another "
            "directory.",
            code="checkpoint-differs",
        )


def restore(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, params: dict[str, Tensor], rule: Rule
) -> None:
    """Restore model and optimizer to the run's last state; the optimizer keeps its hyperparameters."""
    state, last = run.final(), _last_used(run)
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(state[PARAM][name])
            hyper = last.get(run.rule.groups[name])
            if hyper is None:
                continue
            slots = {slot: state[slot][name].to(param, copy=True) for slot in rule.slots if slot != PARAM}
            group = optimizer.param_groups[rule.groups[name]]
            restored = rule.definition.restored(slots, hyper, group, param)
            if restored:
                optimizer.state[param] = restored
            if hyper.get(IDLE):  # a loop that keeps the gradients of frozen parameters has one
                param.grad = torch.zeros_like(param)
        for name, buffer in model.named_buffers():
            if name in run.manifest.buffers:
                buffer.copy_(state[PARAM][name])


def _last_used(run: Run) -> dict[int, Hyper]:
    """Return the hyperparameters of the last step that moved each group; a group that never moved has none."""
    missing = set(run.rule.groups.values())
    found: dict[int, Hyper] = {}
    for index in reversed(range(len(run))):
        hypers = run.record(index).hypers
        found |= {group: hypers[group] for group in missing if not hypers[group].get(STILL)}
        missing -= found.keys()
        if not missing:
            break
    return found


SKIPPED = 32
"""How many steps in a row a gradient scaler may skip: it halves its scale at each."""


class StepsOnDisk:
    """The steps of a run that are on disk, matched with the batches of a loop that starts over from the beginning."""

    def __init__(self, run: Run | None) -> None:
        self._run = run
        self._index = self._part = self._skipped = 0
        self._epoch = 0
        self._generators_restored = run is None
        self.finished = run is not None and run.manifest.finished

    def beyond(self, loader: Any, epoch: int) -> Iterator[tuple[Tensor, Any]]:
        """Yield an epoch's batches with their ids, from the first one that is not on disk."""
        for number, (ids, batch) in enumerate(loader, 1):
            if self.left_early(epoch, ids):
                return
            if not self.covers(ids, batch):
                yield ids, batch
            elif self.left_early(epoch) and number < loader.length:
                return  # before another batch is drawn, as the loop did

    def left_early(self, epoch: int, ids: Tensor | None = None) -> bool:
        """Say whether the recorded loop moved on to the next epoch at this point, or before a batch of these ids.

        A step of the next epoch may begin with batches that this one left over.
        """
        self._epoch = epoch
        record = self._next()
        if record is None or record.epoch <= epoch:
            return False
        may_begin_here = len(record.parts) > 1 and (ids is None or torch.equal(ids, self._part_of(record)))
        return not may_begin_here

    def covers(self, ids: Tensor, batch: Any) -> bool:
        """Say whether the batch's step is on disk; refuse a batch that differs from that step's."""
        record = self._next()
        if record is None:
            return False
        leaves = len(record.fingerprint) // len(record.parts)
        fingerprint = record.fingerprint[self._part * leaves : (self._part + 1) * leaves]
        drawn_anew = self._run is not None and self._run.manifest.structure is not None
        same_data = not fingerprint or drawn_anew or batches.fingerprint(batch) == fingerprint
        if not (same_data and torch.equal(ids, self._part_of(record))):
            if self._was_skipped(record):
                return True
            raise MismatchError(
                f"The loader gives another batch for step {self._index} than the run that is resumed: seed it as "
                "before, and give the same data in the same order.",
                code="batches-differ",
            )
        self._skipped = 0
        self._part += 1
        if self._part == len(record.parts):
            self._part = 0
            self._index += 1
        return True

    def _part_of(self, record: Record) -> Tensor:
        """Return the ids of the step's micro-batch that comes next."""
        starts = [0, *accumulate(part.length for part in record.parts)]
        return record.ids[starts[self._part] : starts[self._part + 1]]

    def _was_skipped(self, record: Record) -> bool:
        """Say whether a batch that is not the next step's may be one whose step a gradient scaler skipped."""
        scaled = self._run is not None and self._run.manifest.autocast == "float16"
        self._skipped += 1
        return scaled and self._part == 0 and self._skipped <= SKIPPED and record.epoch >= self._epoch

    def restore_generators(self) -> None:
        """Restore the random generators, before the first new batch, to their states after the last step."""
        if not self._generators_restored:
            self._generators_restored = True
            after = self._run.random_after() if self._run is not None else None
            if after is not None:
                set_random_state(after)

    def _next(self) -> Record | None:
        return self._run.record(self._index) if self._run is not None and self._index < len(self._run) else None
