"""Reading a run directory: a manifest and shards of steps and states, each compared with its checksum.

``manifest.json``          what was trained and how, which shards there are, whether the run is finished
``initial.safetensors``    the state before step 0
``shard-00000.safetensors`` for a range of steps: ids, epochs, hyperparameters, fingerprints, and the states kept
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from zlib_ng import zlib_ng

from leaveout._util import notebook
from leaveout._util.files import checksum, plain, tensor_checksum
from leaveout._util.generators import RandomState
from leaveout._util.trees import State
from leaveout.errors import InputError, RunError, is_whole
from leaveout.optim import AVERAGE, Rule, Settings
from leaveout.run import averages, kept_batches, uneven
from leaveout.run.gradient_states import RecomputedStates, next_state
from leaveout.run.kept_states import KEPT, StateTensors, whole
from leaveout.run.manifest import AGAIN, INITIAL, Manifest, check_config, read_manifest
from leaveout.run.micro import AFTER, MODES, SCALES, micro_of
from leaveout.run.record import Record
from leaveout.run.remote import local, source
from leaveout.run.seen import held
from leaveout.run.shard_reader import load, read_shard


class Run:
    """A recorded run, or its first ``steps``: a record of each step, and the states that were kept.

    ``end`` is the state after the last step if it was not kept, once a ``Trajectory`` has computed it.
    """

    averaged = False
    """Whether the average of the weights is scored instead of the weights."""

    as_recorded = True
    """Whether the states are exactly those of the training."""

    def __init__(self, path: Path, manifest: Manifest, *, interpolate: bool = False, steps: int | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self.interpolate = interpolate
        self.end: State | None = None
        self._steps = steps
        self._starts = [0, *accumulate(shard.steps for shard in manifest.shards)]
        self._loaded = lru_cache(maxsize=2)(self._load_shard)
        self._tensors = StateTensors(manifest)
        self._recomputed = RecomputedStates(self._stepped, self._last_whole, self.state)
        self._checked: dict[str, tuple[int, int, int]] = {}

    def __reduce__(self) -> tuple:
        """Pickle the run as its path: other processes open it themselves."""
        return _reopened, (source(self.path), len(self), self.interpolate, self.averaged)

    def __len__(self) -> int:
        """Return the number of steps of the run, up to the last state on disk."""
        return self.on_disk[-1] if self._steps is None else self._steps

    @property
    def kept(self) -> list[int]:
        """Which states were kept: ``state(i)`` is the one before step i."""
        return self.on_disk[: bisect_right(self.on_disk, len(self))]

    @cached_property
    def on_disk(self) -> list[int]:
        """The same for the whole run, even if this object is only the first part of it."""
        indices = [0]
        for place, shard in enumerate(self.manifest.shards):
            file = self.path / shard.name
            kept = load(file, {"kept"})["kept"]
            if tensor_checksum(kept) != shard.kept_crc32:
                raise RunError(
                    f"{file} is not the file that was written (checksum of 'kept'): {AGAIN}", code="run-damaged"
                )
            listed = kept.tolist() if kept.dtype == torch.int64 and kept.ndim == 1 else [-1]
            inside = [self._starts[place] < index <= self._starts[place + 1] for index in listed]
            if not all(inside) or listed != sorted(set(listed)):
                raise RunError(f"{file} keeps states of other steps than its own: {AGAIN}", code="run-damaged")
            indices += listed
        if self.manifest.finished and indices[-1] != self.manifest.steps:
            raise RunError(
                f"{self.path} is marked as finished but its last state is not there: {AGAIN}", code="run-damaged"
            )
        return indices

    def _repr_html_(self) -> str:
        first, last = self.record(0), self.record(len(self) - 1)
        kept, batches = f"{len(self.kept)} of {len(self) + 1}", f"of {len(first.ids)}"
        rows = [("steps", len(self)), ("epochs", last.epoch + 1), ("optimizer", self.rule.kind), ("batches", batches)]
        rows.append(("states kept", kept))
        return notebook.card(f"Run {self.path}", (), ("", ""), rows)

    @property
    def held(self) -> str:
        """What of the kept batches is held as it happened, in a sentence; empty if they cannot depend on parameters."""
        return held(self.manifest.seen)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {len(self)} steps of {self.rule.kind})"

    @property
    def fingerprint(self) -> int:
        """A number that identifies this run: its manifest has the checksums of all its files."""
        return zlib_ng.crc32(f"{self.manifest} {len(self)}{' average' if self.averaged else ''}".encode())

    @cached_property
    def rule(self) -> Rule:
        """The optimizer; if steps did not move all parameters alike, those that were treated alike form a group."""
        return self._refined[0]

    @cached_property
    def _refined(self) -> tuple[Rule, list[str]]:
        rule = self.manifest.rule
        if not self.manifest.uneven:
            return rule, []
        return uneven.refined(rule, [self._shard(number) for number in range(len(self.manifest.shards))])

    @property
    def precision(self) -> str:
        """The parameters' dtype and, if forward passes used ``torch.autocast``, its dtype after "around"."""
        own = " and ".join(sorted(set(self.manifest.dtypes.values())))
        return own if self.manifest.autocast is None else f"{own} around {self.manifest.autocast}"

    @property
    def exact(self) -> bool:
        """Say whether each state follows from the one before it, so that it can be checked."""
        return self.as_recorded and not self.interpolate

    def head(self, steps: int) -> Run:
        """Return the run of the first steps only, or the whole run if it has no more.

        If the state after the last of them was not kept, it is recomputed from the recorded batches.
        """
        if not is_whole(steps, 1):
            raise InputError(
                f"head({steps!r}) is not a part of a run: give the number of its first steps, from 1 on.",
                code="head-out-of-range",
            )
        return self._part(min(int(steps), len(self)), interpolate=self.interpolate)

    def average(self) -> Run:
        """Return the same run with the average of the weights (EMA, SWA) scored: see ``Recorder(average=)``."""
        if AVERAGE not in self.manifest.rule.slots:
            raise InputError(
                f"{self} was recorded without an average of its weights: record it with Recorder(average=...).",
                code="average-not-recorded",
            )
        part = self._part(len(self), interpolate=self.interpolate)
        part.averaged = True
        return part

    def _part(self, steps: int, *, interpolate: bool) -> Run:
        part = Run(self.path, self.manifest, interpolate=interpolate, steps=steps)
        part.__dict__ |= {"on_disk": self.on_disk, "_refined": self._refined, "averaged": self.averaged}
        return part

    def interpolated(self) -> Run:
        """Return the same run with the states between kept ones interpolated instead of recomputed.

        This is cheaper, and approximate: steps are then not checked against what was recorded.
        """
        return self._part(len(self), interpolate=True)

    def record(self, index: int) -> Record:
        """Return step ``index`` without its state, with hyperparameters for each group of ``rule``."""
        record = self.written(index)
        hypers = record.hypers
        if self.manifest.uneven:
            hypers = uneven.of_groups(self.manifest.rule, self._refined[1], Settings(hypers, record.places))
        if record.average is not None:
            hypers = [{**hyper, **record.average.columns()} for hyper in hypers]
        return replace(record, hypers=hypers, places=None)

    def written(self, index: int) -> Record:
        """Return step ``index`` as it was written."""
        number, offset = self._find(index)
        shard = self._shard(number)
        lengths = shard["lengths"]
        start = int(lengths[:offset].sum())
        settings = uneven.read(self.manifest.rule, shard, offset)
        return Record(
            index,
            int(shard["epochs"][offset]),
            shard["ids"][start : start + int(lengths[offset])].clone(),
            settings.hypers,
            [(a, b) for a, b in shard["fingerprints"][offset].tolist() if a >= 0],
            micro_of(shard, offset),
            self.manifest.modes[int(shard[MODES][offset])] if MODES in shard else None,
            autocast=self.manifest.autocast,
            places=settings.places,
            average=averages.read(shard, offset),
            scale=float(shard[SCALES][offset]) if SCALES in shard else 1.0,
        )

    def state(self, index: int) -> State:
        """Return a kept state: the one before step ``index``; ``state(len(run))`` is the final one."""
        if index == 0:
            return self._tensors.unflatten(self._initial())
        shard = self._shard(self._find(index - 1)[0])
        if _place(shard[KEPT], index) is None:
            raise RunError(
                f"{self.path} does not keep the state before step {index}: ask a Trajectory, which replays it.",
                code="state-not-kept",
            )
        place = _place(whole(shard), index)
        return self._recomputed.state(index) if place is None else self._tensors.unflatten(shard, place)

    def _last_whole(self, index: int) -> int:
        """Return the index of the last state, up to this one, that is stored whole."""
        for number in range(self._find(index - 1)[0], -1, -1):
            indices = whole(self._shard(number))
            place = int(torch.searchsorted(indices, index, right=True))
            if place > 0:
                return int(indices[place - 1])
        return 0

    def _stepped(self, index: int, state: State) -> State:
        """Return the state after a step, computed from the stored gradient."""
        given = self._tensors.given_at(self._shard(self._find(index)[0]), index + 1)
        return next_state(self.rule, state, given, self.record(index).hypers)

    def batches(self, index: int) -> list[Any]:
        """Return the micro-batches of a step as the loader yielded them; none if they come from the data set."""
        if self.manifest.structure is None:
            return []
        number, _ = self._find(index)
        self._shard(number)  # compares its checksum
        file = self.path / self.manifest.shards[number].name
        read = []
        for part in range(len(self.record(index).parts)):
            start = kept_batches.key(index, part)
            try:
                tensors = load(file, set(), start)
                read.append(kept_batches.unpacked(tensors, start, self.manifest.structure))
            except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                raise RunError(
                    f"{file} does not hold the batch of step {index} ({error!r}): {AGAIN}", code="run-damaged"
                ) from None
        return read

    def random_after(self) -> RandomState | None:
        """Return the random generators' states after the last step; None if forward passes drew no random numbers."""
        number, _ = self._find(len(self) - 1)
        shard = self._shard(number)
        place = int(torch.searchsorted(shard["kept"], len(self)))
        states = {key.removeprefix(AFTER): value[place] for key, value in shard.items() if key.startswith(AFTER)}
        return {device: state.clone() for device, state in states.items()} or None

    def final(self) -> State:
        """Return the state after the last step."""
        return self.state(len(self))

    def damage(self) -> list[str]:
        """Read every file in full and list the problems; the list is empty if there are none."""
        checks: list[Any] = [lambda: self.kept, self._initial, lambda: check_config(self.path)]
        checks += [lambda number=number: self._load_shard(number) for number in range(len(self.manifest.shards))]
        return [problem for check in checks if (problem := _refusal(check)) is not None]

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.manifest.steps:
            raise RunError(
                f"{self.path} has {self.manifest.steps} steps and no step {index}: ask for one from 0 on.",
                code="step-out-of-range",
            )
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def _shard(self, number: int) -> dict[str, Tensor]:
        """Return a shard as it was written; its tensors are mapped from the file, which may change at any time."""
        entry = self.manifest.shards[number]
        self._check_checksum(self.path / entry.name, entry.crc32)
        return self._loaded(number)

    def _initial(self) -> dict[str, Tensor]:
        file = self.path / INITIAL
        self._check_checksum(file, self.manifest.initial_crc32)
        tensors = load(file, self._tensors.keys)
        self._tensors.check(file, {key: tensors[key].unsqueeze(0) for key in self._tensors.keys}, 1)
        return tensors

    def _load_shard(self, number: int) -> dict[str, Tensor]:
        entry = self.manifest.shards[number]
        file = self.path / entry.name
        self._check_checksum(file, entry.crc32)
        return read_shard(file, entry, self.manifest, self._tensors)

    def _check_checksum(self, file: Path, crc32: int) -> None:
        """Read a file in full and compare its checksum, unless that was done before and the file is unchanged."""
        try:
            status = file.stat()
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._checked.get(file.name) == seen:
                return
            now = checksum(plain(file))
        except OSError as error:
            raise RunError(f"{file} cannot be read ({error.strerror or error}): {AGAIN}", code="run-damaged") from None
        if now != crc32:
            raise RunError(f"{file} is not the file that was written (checksum): {AGAIN}", code="run-damaged")
        self._checked[file.name] = seen


def _reopened(path: str, steps: int, interpolate: bool, averaged: bool = False) -> Run:
    run = open_run(path, partial=True).head(steps)
    run.averaged = averaged
    return run.interpolated() if interpolate else run


def _place(numbers: Tensor, index: int) -> int | None:
    """Return the position of a number in a sorted list; None if it is not there."""
    place = int(torch.searchsorted(numbers, index))
    return place if place < len(numbers) and int(numbers[place]) == index else None


def _refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except RunError as error:
        return str(error)
    return None


def open_run(path: str | Path, *, partial: bool = False) -> Run:
    """Open a run directory.

    Args:
        path: the directory a ``Recorder`` or ``train`` wrote, or an address of one that fsspec understands, such as
            ``s3://bucket/run``.
        partial: accept a run that was cut short, as the run of the steps that are on disk.
    """
    path = local(path)
    run = Run(path, read_manifest(path))
    if len(run) == 0:
        raise RunError(
            f"The run in {path} has no complete step on disk: call recorder.finish() if its Recorder still exists in "
            "this process; otherwise record it again, and let finish() end it.",
            code="run-without-steps",
        )
    if not run.manifest.finished and not partial:
        raise RunError(
            f"The run in {path} was cut short after step {len(run) - 1}: call recorder.finish() if its Recorder still "
            "exists, continue it with resume=True, or use open_run(path, partial=True) for the steps that are there.",
            code="run-cut-short",
        )
    return run
