"""The runner of all experiments: computes missing cells, saves each at once, and reads the finished ones."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path

import pandas as pd
import torch

from experiments.reproduce.spec import Row, Settings, Spec
from leaveout._util.files import check_writable, or_null, save_text
from leaveout._util.leftovers import remove_asides
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, RunError


def folder_of(spec: Spec, out: Path, *, quick: bool) -> Path:
    """Return the directory of an experiment's results; quick ones have a separate one."""
    return out / (f"{spec.name}-quick" if quick else spec.name)


def compute(
    spec: Spec,
    out: Path,
    seeds: int | None = None,
    *,
    quick: bool = False,
    part: tuple[int, int] = (1, 1),
    resources: Resources | None = None,
) -> int:
    """Compute the missing cells and return their number.

    Args:
        spec: the experiment.
        out: the directory of all results.
        seeds: how many seeds; the experiment's own number by default.
        quick: the small version.
        part: ``(1, 2)`` and ``(2, 2)`` share the cells between two processes.
        resources: whether to show progress, and the engine that computes the cells.
    """
    if seeds is not None and seeds < 1:
        raise InputError(f"seeds={seeds} leaves nothing to do: give at least 1.", code="seeds-not-a-count")
    first, parts = part
    if not 1 <= first <= parts:
        raise InputError(
            f"part {first}/{parts} does not exist: write 1/{parts} to {parts}/{parts}.", code="part-does-not-exist"
        )
    cells = spec.cells(seeds or spec.seeds, quick)[first - 1 :: parts]
    folder = folder_of(spec, out, quick=quick) / "cells"
    check_writable(folder / "cell")
    remove_asides(folder / "cell")
    missing = [settings for settings in cells if not (folder / spec.file(settings)).exists()]
    for place, result in (resources or Resources()).map(partial(_computed, spec), missing, spec.name):
        file = folder / spec.file(missing[place])
        save_text(file, json.dumps(result, allow_nan=False) + "\n")
        remove_asides(file)
    return len(missing)


def _computed(spec: Spec, settings: Settings) -> Row:
    start = time.perf_counter()
    rows = spec.compute(settings)
    return {
        "experiment": spec.name,
        "settings": dict(settings),
        "seconds": round(time.perf_counter() - start, 2),
        "torch": torch.__version__,
        "rows": [_plain(row) for row in rows],
    }


def finished(spec: Spec, out: Path, seeds: int | None = None, *, quick: bool = False) -> pd.DataFrame:
    """Read the rows of all finished cells with their settings, for at least the experiment's own number of seeds."""
    folder = folder_of(spec, out, quick=quick) / "cells"
    rows: list[Row] = []
    for settings in spec.cells(max(seeds or 0, spec.seeds), quick):
        file = folder / spec.file(settings)
        if os.path.exists(file):  # no OSError if the name is too long
            rows += [
                {**settings, **row, "cell_seconds": result["seconds"]}
                for result in [_read(file, settings)]
                for row in result["rows"]
            ]
    if not rows:
        raise RunError(
            f"{folder} holds no finished cell of {spec.name!r}: run python -m experiments reproduce {spec.name} first.",
            code="cells-missing",
        )
    return pd.DataFrame(rows)


def _read(file: Path, settings: Settings) -> Row:
    try:
        content = json.loads(file.read_text())
        if content["settings"] != json.loads(json.dumps(settings)):
            raise ValueError("its settings are not those that its name stands for")
        return {"seconds": float(content["seconds"]), "rows": list(content["rows"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(
            f"{file} cannot be read ({error}): delete it, and the cell is computed again.", code="cell-unreadable"
        ) from None


def _plain(row: Row) -> Row:
    """Write a metric that does not exist as null."""
    return {key: or_null(value) for key, value in row.items()}
