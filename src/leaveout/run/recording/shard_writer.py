"""The files of a run as they are written: the state before the first step, and shards of steps with their states.

After each of them the manifest is written that names it; so what a manifest names is on disk.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leaveout._util.files import checksum, tensor_checksum
from leaveout._util.tensor_files import Rows, write_tensors_checked
from leaveout._util.trees import State
from leaveout.errors import UnsupportedError
from leaveout.optim import Settings
from leaveout.run import averages, kept_batches, kept_states, micro, uneven
from leaveout.run.gradient_states import StepGradients
from leaveout.run.kept_states import KEPT
from leaveout.run.manifest import INITIAL, Manifest, Shard, shard_name, write_manifest
from leaveout.run.paths import CONFIG
from leaveout.run.record import Record
from leaveout.run.recording.noting import fingerprints


def write_start(path: Path, manifest: Manifest, initial: State) -> Manifest:
    """Write the state before the first step, then the manifest that names it."""
    config = path / CONFIG
    manifest = replace(
        manifest,
        initial_crc32=write_tensors_checked(path / INITIAL, kept_states.flatten(initial)),
        config_crc32=checksum(config) if config.exists() else None,
    )
    write_manifest(path, manifest)
    return manifest


def write_shard(
    path: Path,
    number: int,
    records: Sequence[Record],
    states: dict[int, State | StepGradients],
    manifest: Manifest,
    *,
    last: bool = False,
) -> Manifest:
    """Write a shard, then the manifest that names it, which marks the run as finished if the shard is the last."""
    tensors = _log_tensors(records)
    tensors |= micro.written([record.parts for record in records])
    tensors |= averages.written([record.average for record in records])
    tensors |= uneven.written(manifest.rule, [Settings(record.hypers, record.places) for record in records])
    if any(record.scale != 1 for record in records):
        tensors[micro.SCALES] = torch.tensor([record.scale for record in records], dtype=torch.float64)
    modes = _all_modes(records, manifest)
    tensors |= _mode_tensors(records, modes)
    tensors |= _random_tensors(records, states)
    for record in records:
        for part, batch in enumerate(record.batches):
            tensors |= kept_batches.packed(batch, kept_batches.key(record.index, part))
            if manifest.structure is None:
                manifest = replace(manifest, structure=kept_batches.structure(batch))
    kept = kept_states.written(states)
    crc32 = write_tensors_checked(path / shard_name(number), tensors | kept)
    shard = Shard(number, len(records), crc32, tensor_checksum(kept[KEPT]))  # type: ignore[arg-type]
    manifest = replace(
        manifest,
        shards=(*manifest.shards, shard),
        modes=modes,
        autocast=_autocast(records, manifest),
        uneven=manifest.uneven or uneven.PLACES in tensors,
        finished=manifest.finished or last,
    )
    write_manifest(path, manifest)
    return manifest


def _log_tensors(records: Sequence[Record]) -> dict[str, Tensor | Rows]:
    """Return the tensors with a row per step; a step with fewer fingerprints than others is padded with -1."""
    marks = fingerprints(records)
    most = max(map(len, marks))
    padded = [[*of_step, *[(-1, -1)] * (most - len(of_step))] for of_step in marks]
    return {
        "ids": torch.from_numpy(np.concatenate([record.ids.numpy() for record in records])),
        "lengths": torch.tensor([len(record.ids) for record in records]),
        "epochs": torch.tensor([record.epoch for record in records]),
        "fingerprints": torch.tensor(padded, dtype=torch.int64).reshape(len(records), most, 2),
    }


def _all_modes(records: Sequence[Record], manifest: Manifest) -> tuple[tuple[str, ...], ...]:
    """Return the manifest's modes and those that these steps add; none are added if a step's was not recorded."""
    modes = [record.training for record in records if record.training is not None]
    if len(modes) < len(records):
        return manifest.modes
    return tuple(dict.fromkeys([*manifest.modes, *modes]))


def _mode_tensors(records: Sequence[Record], modes: tuple[tuple[str, ...], ...]) -> dict[str, Tensor | Rows]:
    places = [modes.index(record.training) for record in records if record.training is not None]
    return {micro.MODES: torch.tensor(places)} if len(places) == len(records) else {}


def _random_tensors(records: Sequence[Record], states: Collection[int]) -> dict[str, Tensor | Rows]:
    """Return the random generators' states at the shard's kept states; none unless all of them are known."""
    after = {record.index + 1: record.after for record in records}
    random = [after.get(index) for index in states]
    known = [state for state in random if state is not None]
    if not known or len(known) < len(random):
        return {}
    return {f"{micro.AFTER}{device}": [state[device] for state in known] for device in known[0]}


def _autocast(records: Sequence[Record], manifest: Manifest) -> str | None:
    """Return the one dtype that forward passes were cast to; it is the same in all steps of a run."""
    kinds = {record.autocast for record in records} | ({manifest.autocast} if manifest.shards else set())
    if len(kinds) > 1:
        raise UnsupportedError(
            "Some steps were taken with torch.autocast and some without, or with another type: train in one way, or "
            "finish() between them and record two runs.",
            code="autocast-changed",
        )
    return kinds.pop()
