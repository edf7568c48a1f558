"""Writes the run directory: shards on a separate thread, and the manifest after each of them.

What the manifest names is on disk. A process that is killed, or a machine that loses power, leaves the run up to the
last shard that the manifest names; writing continues from there.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from leaveout._util.files import SURROGATE, asides, is_full
from leaveout._util.lock import LOCK, Lock
from leaveout._util.trees import PARAM, State
from leaveout.errors import RunError
from leaveout.optim.averaging import Update
from leaveout.run.gradient_states import StepGradients, size_of
from leaveout.run.manifest import INITIAL, MANIFEST, Manifest, read_manifest, write_manifest
from leaveout.run.paths import CONFIG
from leaveout.run.record import Record
from leaveout.run.recording.shard_writer import write_shard, write_start

if TYPE_CHECKING:
    from leaveout.run.reader import Run

SHARD_BYTES = 16_000_000
SHARD_STEPS = 4096
SHARD_SECONDS = 10.0
SHARDS = r"shard-\d+\.safetensors"
EARLY = re.compile("|".join(map(re.escape, (LOCK, INITIAL, CONFIG))))
"""What a writer leaves when it is killed before its manifest exists, besides temporary files."""
LEFT = re.compile(f"{EARLY.pattern}|{SHARDS}")
"""What it leaves when it is killed later."""
ASIDE = re.compile(asides("|".join((*map(re.escape, (MANIFEST, INITIAL, CONFIG)), SHARDS))))


class Writer:
    """Appends steps to a run directory, either a new one or one that was cut short.

    Args:
        path: the directory.
        shard_bytes: how much is held before it is written.
        resume: continue the run in the directory, if there is one; ``before`` is then the part of it that stays.
        steps: how many of its steps stay; by default all up to its last kept state.

    Raises:
        RunError: if the directory holds anything else, or has another writer.
    """

    def __init__(
        self, path: str | Path, shard_bytes: int = SHARD_BYTES, *, resume: bool = False, steps: int | None = None
    ) -> None:
        self.path = Path(path)
        self._lock = claim(path, resume=resume)
        self._shard_bytes = shard_bytes
        self._manifest: Manifest | None = None
        self._records: list[Record] = []
        self._states: dict[int, State | StepGradients] = {}
        self._held = 0
        self._number = 0
        self._seen: dict[str, str] = {}
        self._flushed = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leaveout-writer")
        self._writing: Future[Manifest] | None = None
        self.before: Run | None = None
        if resume and ((self.path / MANIFEST).exists() or steps is not None):
            from leaveout.run.reader import Run  # only what is resumed is read

            try:
                self._reopen(Run(self.path, read_manifest(self.path)), steps)
            except BaseException:
                self.abandon()
                raise

    @property
    def unfinished(self) -> bool:
        """Say whether a run was begun and is not finished."""
        return self._writing is not None or (self._manifest is not None and not self._manifest.finished)

    def begin(self, manifest: Manifest, initial: State) -> None:
        """Write the state before the first step while training goes on; its tensors must not change afterwards."""
        self._writing = self._thread.submit(write_start, self.path, manifest, initial)

    def append(self, record: Record, state: State | StepGradients | None, held: int | None = None) -> None:
        """Add one step, and the state after it if it is to be kept; its tensors must not change afterwards.

        Instead of the state there may be what the step was given, if the state before it is kept. ``held`` is the
        number of bytes of both, and of batches that are kept with them, if they have been counted.

        The newest step is never written before the next one arrives: ``finish`` may still give it its state.
        """
        if self._writing is not None and self._writing.done():
            self._wait()
        late = time.monotonic() - self._flushed > SHARD_SECONDS
        if self._records and (self._held >= self._shard_bytes or len(self._records) >= SHARD_STEPS or late):
            self._flush()
        self._records.append(record)
        if state is not None:
            self._states[record.index + 1] = state
        if held is None:
            held = 0 if state is None else size_of(state)
        self._held += held

    @property
    def newest(self) -> StepGradients | None:
        """What is kept for the last step's state, if that is not the state itself."""
        kept = self._states.get(self._records[-1].index + 1) if self._records else None
        return kept if isinstance(kept, StepGradients) else None

    def settle(self, final: Callable[[], State | None]) -> bool:
        """Ensure that the newest state is kept: whole, if the gradient that led to it may have been written to.

        ``final`` copies the state, if it still exists. Return whether the gradient may have been written to.
        """
        given = self.newest
        if given is None or given.intact():
            return False
        state = final()
        if state is None and given.unchanged():
            return False  # a loop whose writes are not counted would have been noticed before
        # Buffers may have changed with the next forward pass.
        self.replace_newest(state and {**state, PARAM: {**state[PARAM], **given.moved}})
        return True

    def replace_newest(self, state: State | None) -> None:
        """Keep this as the last step's state, or do not keep that state at all."""
        index = self._records[-1].index + 1
        if state is None:
            del self._states[index]
        else:
            self._states[index] = state

    def amend(self, average: Update, slot: State) -> bool:
        """Record how the weight average changed after the newest step; return False if that step is on disk already.

        ``slot`` is the average, as a slot of the state.
        """
        if not self._records:
            return False
        self._records[-1] = replace(self._records[-1], average=average)
        state = self._states.get(self._records[-1].index + 1)
        if isinstance(state, dict):
            state |= slot
        return True

    def finish(self, final: State | None = None, *, complete: bool = True) -> None:
        """Wait until everything is on disk; ``complete=False`` leaves the run marked as cut short.

        The last state is always kept: ``final`` provides it if the last step's was not.
        """
        try:
            self._wait()
            new = self.before is None
            if new and self._manifest is not None:
                _tidy(self.path, self._manifest)  # before it is finished: a finished run is never tidied
            if self._records:
                assert self._manifest is not None  # noqa: S101 - begin() comes first; a bug of ours otherwise
                if final is not None:
                    self.replace_newest(final)
                self.settle(lambda: None)
                # Not on the thread: no thread starts while the interpreter shuts down.
                manifest = self._saying(self._manifest)
                self._manifest = write_shard(
                    self.path, self._number, self._records, self._states, manifest, last=complete and new
                )
            if self._manifest is not None:
                if not new:
                    write_manifest(self.path, self._manifest)  # it may name less than the one on disk
                    _tidy(self.path, self._manifest)
                if complete and not (new and self._manifest.finished):
                    self._manifest = replace(self._saying(self._manifest), finished=True)
                    write_manifest(self.path, self._manifest)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the directory as it is."""
        self._thread.shutdown(wait=True)
        self._records, self._states = [], {}
        self._lock.release()

    def note(self, fact: str, value: str) -> None:
        """Add to what was seen of the loop, which the manifest says from the next shard on."""
        self._seen[fact] = value

    def _saying(self, manifest: Manifest) -> Manifest:
        """Return the manifest with what was seen of the loop."""
        return replace(manifest, seen={**manifest.seen, **self._seen})

    def flush(self, state: State | None) -> bool:
        """Write the steps so far, with the state after the last of them; return whether there was anything to write."""
        self._wait()
        if not self._records:
            return False
        if state is not None:
            self.replace_newest(state)
        self._flush()
        self._wait()
        return True

    def _reopen(self, run: Run, steps: int | None) -> None:
        """Reopen the run up to its last kept state, or the one after ``steps`` steps; later steps are taken again.

        A shard that extends beyond that state is read into memory. It is rewritten under a number of its own, so that
        the old one exists until the manifest names the new one.
        """
        if steps is not None and steps not in run.on_disk[1:]:
            raise RunError(
                f"The run in {self.path} does not have the state after {steps} steps, from which training continues "
                f"(it has those up to step {len(run)}): use a checkpoint that was saved with recorder.flush(), "
                "or record into another directory.",
                code="checkpoint-not-recorded",
            )
        _tidy(self.path, run.manifest)
        run = run if steps is None else run.head(steps)
        if len(run) == 0:
            return
        ends = accumulate(shard.steps for shard in run.manifest.shards)
        whole = tuple(shard for shard, end in zip(run.manifest.shards, ends, strict=True) if end <= len(run))
        self._manifest = replace(run.manifest, shards=whole, finished=run.manifest.finished and steps is None)
        self._number = max(shard.number for shard in run.manifest.shards) + 1
        self._records = [
            replace(run.written(index), batches=tuple(run.batches(index)))
            for index in range(self._manifest.steps, len(run))
        ]
        self._states = {index: run.state(index) for index in run.kept if index > self._manifest.steps}
        self._held = sum(map(size_of, self._states.values()))
        self.before = run

    def _flush(self) -> None:
        self._wait()  # writing one shard at a time bounds what is held in memory
        assert self._manifest is not None  # noqa: S101 - begin() comes first; a bug of ours otherwise
        manifest = self._saying(self._manifest)
        self._writing = self._thread.submit(write_shard, self.path, self._number, self._records, self._states, manifest)
        self._number += 1
        self._records, self._states, self._held, self._flushed = [], {}, 0, time.monotonic()

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._manifest = writing.result()


def claim(address: str | Path, *, resume: bool = False) -> Lock:
    """Lock the directory for its writer, or refuse if it holds something or is being written."""
    path = Path(address)
    try:
        if "://" in str(address):
            raise ValueError("it is no local directory; a run is copied to such a place when it is finished")
        if SURROGATE.search(str(path)):
            raise ValueError("it is not valid UTF-8")
        check_free(path, resume=resume)
        path.mkdir(parents=True, exist_ok=True)
        lock = Lock(path)
    except (OSError, ValueError) as error:
        remedy = "make room, or choose another directory" if is_full(error) else "choose another directory"
        raise RunError(
            f"{address} cannot be written ({error}): {remedy} for the run.", code="run-not-writable"
        ) from None
    try:
        check_free(path, resume=resume)
    except RunError:
        lock.release()
        raise
    return lock


def check_free(path: Path, *, resume: bool) -> None:
    """Refuse a directory that holds anything other than a config or the run to be continued."""
    if (path / MANIFEST).exists():
        if resume:
            return
        raise RunError(
            f"{path} already holds a run: choose another directory, replace it with overwrite=True, or continue it "
            "with resume=True.",
            code="run-exists",
        )
    if not path.exists():
        return
    if not path.is_dir() or not all(_ours(file, EARLY) for file in path.iterdir()):
        raise RunError(
            f"{path} is there already and not an empty directory: choose another one for the run.",
            code="directory-not-empty",
        )


def _tidy(path: Path, manifest: Manifest) -> None:
    """Remove what a killed writer left next to the run; only the run's one writer may do so."""
    named = {MANIFEST, INITIAL, LOCK, CONFIG, *(shard.name for shard in manifest.shards)}
    for file in path.iterdir():
        if file.name not in named and _ours(file, LEFT):
            shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()


def _ours(file: Path, names: re.Pattern[str]) -> bool:
    return bool(ASIDE.fullmatch(file.name) or (names.fullmatch(file.name) and file.is_file()))
