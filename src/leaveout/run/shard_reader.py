"""Reads a shard file, and refuses one whose tensors are not the steps and states that the manifest describes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from leaveout._util.files import plain
from leaveout.errors import RunError
from leaveout.optim import Rule
from leaveout.run import averages, micro, uneven
from leaveout.run.kept_states import KEPT, WHOLE, StateTensors, whole
from leaveout.run.manifest import AGAIN, Manifest, Shard
from leaveout.run.micro import FURTHER

LOG = {"lengths": 1, "epochs": 1, "hypers": 3, "fingerprints": 3}
"""The tensors with one row per step, and their number of dimensions."""


def read_shard(file: Path, entry: Shard, manifest: Manifest, states: StateTensors) -> dict[str, Tensor]:
    """Read the steps of a shard and the states that it keeps, without batches; refuse tensors that are not sound."""
    shard = load(file, {*LOG, "ids", KEPT})
    rule = manifest.rule
    if not _log_is_sound(shard, entry.steps, rule):
        raise RunError(f"{file} does not hold {entry.steps} steps of this run: {AGAIN}", code="run-damaged")
    count = shard[KEPT].numel()
    if count > 0:
        shard |= load(file, set(), WHOLE)
        if WHOLE in shard:
            shard |= load(file, states.given)
            states.check_given(file, shard)
        whole_states = whole(shard).numel()
        if whole_states > 0:
            shard |= load(file, states.keys)
            states.check(file, shard, whole_states)
    further = load(file, set(), FURTHER)
    if not (
        micro.is_sound(further, shard["lengths"], len(manifest.modes), count)
        and averages.is_sound(further, entry.steps)
        and uneven.is_sound(rule, shard | further, entry.steps)
    ):
        raise RunError(f"{file} does not hold the micro-batches of this run: {AGAIN}", code="run-damaged")
    return shard | further


def _log_is_sound(shard: dict[str, Tensor], steps: int, rule: Rule) -> bool:
    """Say whether a shard has valid ids, epochs, hyperparameters and fingerprints for this number of steps."""
    return (
        shard["hypers"].dtype == torch.float64
        and all(shard[key].ndim == LOG[key] and len(shard[key]) == steps for key in LOG)
        and all(shard[key].dtype == torch.int64 for key in ("ids", *LOG) if key != "hypers")
        and shard["hypers"].shape[1] > max(rule.groups.values())
        and shard["hypers"].shape[2] == len(rule.hypers)
        and shard["fingerprints"].shape[2] == 2
        and int(shard["lengths"].min()) >= 1
        and shard["ids"].shape == (sum(shard["lengths"].tolist()),)  # a tensor's sum may overflow
        and int(shard["ids"].min()) >= 0
        and int(shard["epochs"].min()) >= 0
    )


def load(file: Path, needed: set[str], more: str | None = None) -> dict[str, Tensor]:
    """Load the needed tensors of a file, and those whose names begin with ``more``; they change if the file does."""
    try:
        with safe_open(plain(file), framework="pt") as opened:
            missing = sorted(needed - set(opened.keys()))
            if missing:
                raise OSError(f"it has no {missing[0]!r}")
            others = {key for key in opened.keys() if more and key.startswith(more)}  # noqa: SIM118 - not a dict
            return {key: opened.get_tensor(key) for key in needed | others}
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file} cannot be read ({error}): {AGAIN}", code="run-damaged") from None
