"""The run directory: a manifest and shards of steps and states, each written aside and then renamed.

``manifest.json``          what was trained and how, how many steps are on disk, whether the run is finished
``initial.safetensors``    the state before step 0
``shard-00000.safetensors`` for a range of steps: ids, epochs, hyperparameters, fingerprints, and the states kept
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from leaveout.beside import CONFIG
from leaveout.errors import RunError
from leaveout.optim import HYPERS, Hyper, Rule
from leaveout.remote import local, source
from leaveout.vectors import State, nbytes

FORMAT = 1
MANIFEST = "manifest.json"
INITIAL = "initial.safetensors"
SHARD_BYTES = 64_000_000
SHARD_STEPS = 4096
SHARD_SECONDS = 10.0
LOG = {"lengths", "epochs", "hypers", "fingerprints"}


@dataclass(frozen=True)
class Record:
    """One step as it was taken: everything but the state."""

    index: int
    epoch: int
    ids: Int[Tensor, " batch"]
    hypers: list[Hyper]
    fingerprint: list[tuple[int, int]]


@dataclass(frozen=True)
class Manifest:
    """What a run directory says of itself."""

    rule: Rule
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    constants: dict[str, int]
    train_size: int | None
    shards: tuple[int, ...] = ()
    finished: bool = False
    format: int = FORMAT

    @property
    def steps(self) -> int:
        """How many steps are on disk."""
        return sum(self.shards)


def shard_name(number: int) -> str:
    """Shards are found by number, never by a name that a manifest gives."""
    return f"shard-{number:05d}.safetensors"


class Writer:
    """Appends steps to a new run directory; shards are written by a thread of their own.

    Raises:
        RunError: if the directory holds anything already.
    """

    def __init__(self, path: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.path = Path(path)
        claim(self.path)
        self._shard_bytes = shard_bytes
        self._manifest: Manifest | None = None
        self._records: list[Record] = []
        self._states: dict[int, State] = {}
        self._held = 0
        self._flushed = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leaveout-writer")
        self._writing: Future[Any] | None = None

    def begin(self, manifest: Manifest, initial: State) -> None:
        """Writes the state before the first step."""
        self._manifest = manifest
        write_tensors(self.path / INITIAL, _flatten(initial))
        write_manifest(self.path, manifest)

    def append(self, record: Record, state: State | None) -> None:
        """Takes one step, and the state after it if it is to be kept; its tensors must not change afterwards."""
        self._records.append(record)
        if state is not None:
            self._states[record.index + 1] = state
            self._held += nbytes(state)
        late = time.monotonic() - self._flushed > SHARD_SECONDS
        if self._held >= self._shard_bytes or len(self._records) >= SHARD_STEPS or late:
            self._flush()

    def finish(self, final: State | None = None, *, complete: bool = True) -> None:
        """Waits until everything is on disk; ``complete=False`` leaves the run marked as cut short.

        The last state is always kept: ``final`` gives it where the last step's was not.
        """
        if self._records:
            if final is not None:
                self._states[self._records[-1].index + 1] = final
            self._flush()
        self._wait()
        self._thread.shutdown()
        if complete and self._manifest is not None:
            self._manifest = _but(self._manifest, finished=True)
            write_manifest(self.path, self._manifest)

    def _flush(self) -> None:
        self._wait()  # one shard under way at a time bounds what is held in memory
        assert self._manifest is not None  # noqa: S101 - begin() comes first; a bug of ours otherwise
        number = len(self._manifest.shards)
        self._manifest = _but(self._manifest, shards=(*self._manifest.shards, len(self._records)))
        self._writing = self._thread.submit(
            _write_shard, self.path, number, self._records, self._states, self._manifest
        )
        self._records, self._states, self._held, self._flushed = [], {}, 0, time.monotonic()

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None


def claim(path: Path) -> None:
    """Makes the directory, or refuses if something other than a config is there."""
    if (path / MANIFEST).exists():
        raise RunError(f"{path} already holds a run: choose another directory, or delete it first.")
    if path.exists() and (not path.is_dir() or any(file.name != CONFIG for file in path.iterdir())):
        raise RunError(f"{path} is there already and not an empty directory: choose another one for the run.")
    path.mkdir(parents=True, exist_ok=True)


def _but(manifest: Manifest, **changes: Any) -> Manifest:
    return Manifest(**{**manifest.__dict__, **changes})


def _write_shard(
    path: Path, number: int, records: Sequence[Record], states: dict[int, State], manifest: Manifest
) -> None:
    names = HYPERS[manifest.rule.kind]
    leaves = max(len(record.fingerprint) for record in records)
    prints = [[*record.fingerprint, *[(-1, -1)] * (leaves - len(record.fingerprint))] for record in records]
    tensors = {
        "ids": torch.cat([record.ids for record in records]),
        "lengths": torch.tensor([len(record.ids) for record in records]),
        "epochs": torch.tensor([record.epoch for record in records]),
        "hypers": torch.tensor([[[h[name] for name in names] for h in r.hypers] for r in records], dtype=torch.float64),
        "fingerprints": torch.tensor(prints, dtype=torch.int64).reshape(len(records), leaves, 2),
    }
    tensors["kept"] = torch.tensor(list(states), dtype=torch.int64)
    flat = [_flatten(state) for state in states.values()]
    if flat:
        tensors |= {key: torch.stack([state[key] for state in flat]) for key in flat[0]}
    write_tensors(path / shard_name(number), tensors)
    write_manifest(path, manifest)


def _flatten(state: State) -> dict[str, Tensor]:
    return {f"state/{slot}/{name}": tensor for slot, params in state.items() for name, tensor in params.items()}


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file that is there whole or not at all."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, aside, metadata)
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """A text file that is there whole or not at all."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """The manifest, replaced in one move."""
    write_text(path / MANIFEST, json.dumps(asdict(manifest), indent=1))


class Run:
    """A recorded run: its steps and the state before and after each."""

    def __init__(self, path: Path, manifest: Manifest, *, interpolate: bool = False) -> None:
        self.path = path
        self.manifest = manifest
        self.interpolate = interpolate
        starts = [0]
        for count in manifest.shards:
            starts.append(starts[-1] + count)
        self._starts = torch.tensor(starts)
        self._shard = lru_cache(maxsize=2)(self._load_shard)

    def __reduce__(self) -> tuple:
        """Travels to other processes as its path: they open it themselves."""
        return _reopened, (source(self.path), len(self), self.interpolate)

    def __len__(self) -> int:
        """How many steps the run has, up to the last state that is on disk."""
        return self.kept[-1]

    @cached_property
    def kept(self) -> list[int]:
        """Which states are on disk: ``state(i)`` is the one before step i."""
        found = [0]
        for number in range(len(self.manifest.shards)):
            found += _load(self.path / shard_name(number), {"kept"}, only=True)["kept"].tolist()
        return found

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {len(self)} steps of {self.rule.kind})"

    @property
    def rule(self) -> Rule:
        """The optimizer."""
        return self.manifest.rule

    def head(self, steps: int) -> Run:
        """The run of the first steps only, up to the first kept state at or after ``steps``."""
        stop = next(index for index in self.kept if index >= min(steps, len(self)))
        short = Run(self.path, self.manifest, interpolate=self.interpolate)
        short.__dict__["kept"] = [index for index in self.kept if index <= stop]
        return short

    def interpolated(self) -> Run:
        """The same run with the states between kept ones interpolated instead of computed again.

        Cheaper, and approximate: steps are then not checked against what was recorded.
        """
        whole = Run(self.path, self.manifest, interpolate=True)
        whole.__dict__["kept"] = self.kept
        return whole

    def record(self, index: int) -> Record:
        """Step ``index`` without its state."""
        number, offset = self._find(index)
        shard = self._shard(number)
        lengths = shard["lengths"]
        start = int(lengths[:offset].sum())
        names = HYPERS[self.rule.kind]
        return Record(
            index,
            int(shard["epochs"][offset]),
            shard["ids"][start : start + int(lengths[offset])],
            [dict(zip(names, values, strict=True)) for values in shard["hypers"][offset].tolist()],
            [(a, b) for a, b in shard["fingerprints"][offset].tolist() if a >= 0],
        )

    def state(self, index: int) -> State:
        """A kept state: the one before step ``index``; ``state(len(run))`` is the final one."""
        if index == 0:
            return self._unflatten(_load(self.path / INITIAL, self._keys))
        number, _ = self._find(index - 1)
        shard = self._shard(number)
        place = int(torch.searchsorted(shard["kept"], index))
        if place == len(shard["kept"]) or int(shard["kept"][place]) != index:
            raise RunError(
                f"{self.path} does not keep the state before step {index}: ask a Trajectory, which replays it."
            )
        return self._unflatten({key: shard[key][place] for key in shard if key.startswith("state/")})

    def final(self) -> State:
        """The state after the last step."""
        return self.state(len(self))

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.manifest.steps:
            raise RunError(f"{self.path} has {self.manifest.steps} steps and no step {index}: ask for one from 0 on.")
        number = int(torch.searchsorted(self._starts, index, right=True)) - 1
        return number, index - int(self._starts[number])

    @property
    def _keys(self) -> set[str]:
        return {f"state/{slot}/{name}" for slot in self.rule.slots for name in self.rule.groups}

    def _load_shard(self, number: int) -> dict[str, Tensor]:
        file = self.path / shard_name(number)
        shard = _load(file, LOG | {"ids", "kept"})
        states = self._keys if len(shard["kept"]) else set()
        count = self.manifest.shards[number]
        if any(len(shard[key]) != count for key in LOG) or len(shard["ids"]) != int(shard["lengths"].sum()):
            raise RunError(f"{file} does not hold {count} steps: the run is damaged; restore it or record it again.")
        if not states <= set(shard) or any(len(shard[key]) != len(shard["kept"]) for key in states):
            raise RunError(f"{file} does not hold the states of this run: restore it or record it again.")
        return shard

    def _unflatten(self, tensors: dict[str, Tensor]) -> State:
        return {slot: {name: tensors[f"state/{slot}/{name}"] for name in self.rule.groups} for slot in self.rule.slots}


def _reopened(path: str, steps: int, interpolate: bool) -> Run:
    run = open_run(path, partial=True).head(steps)
    return run.interpolated() if interpolate else run


def _load(file: Path, needed: set[str], *, only: bool = False) -> dict[str, Tensor]:
    """The tensors of a file, or ``only`` those that are needed."""
    try:
        with safe_open(file, framework="pt") as opened:
            present = set(opened.keys())
            if missing := sorted(needed - present):
                raise OSError(f"it has no {missing[0]!r}")
            return {key: opened.get_tensor(key) for key in (needed if only else present)}
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file} cannot be read ({error}): the run is damaged; restore it or record it again.") from None


def open_run(path: str | Path, *, partial: bool = False) -> Run:
    """Opens a run directory.

    Args:
        path: the directory a ``Recorder`` or ``train`` wrote, or an address of one that fsspec understands, such as
            ``s3://bucket/run``.
        partial: accept a run that was cut short, as the run of the steps that are on disk.
    """
    path = local(path)
    file = path / MANIFEST
    if not file.exists():
        raise RunError(f"{path} holds no run (no {MANIFEST}): give the directory that a Recorder wrote.")
    try:
        raw = json.loads(file.read_text())
        if raw["format"] != FORMAT:
            raise RunError(
                f"{path} is in format {raw['format']}, this version reads {FORMAT}: use the version that wrote it."
            )
        rule = Rule(raw["rule"]["kind"], raw["rule"]["groups"], tuple(raw["rule"]["slots"]))
        if rule.kind not in HYPERS:
            raise ValueError(f"unknown optimizer {rule.kind!r}")
        manifest = Manifest(**{**raw, "rule": rule, "shards": tuple(int(count) for count in raw["shards"])})
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} is not a manifest of a run ({error!r}): restore it or record the run again.") from None
    run = Run(path, manifest)
    if len(run) == 0:
        raise RunError(f"The run in {path} has no complete step on disk: record it again.")
    if not manifest.finished and not partial:
        raise RunError(
            f"The run in {path} was cut short after step {len(run) - 1}: record it again, or use "
            "open_run(path, partial=True) for the steps that are there."
        )
    return run
