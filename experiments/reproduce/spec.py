"""The definition of an experiment: a list of cells, a function that computes one, and how the results are shown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from experiments.reproduce.plots import Plot

Settings: TypeAlias = Mapping[str, Any]
Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """One experiment. A new one is a file that builds a ``Spec``, and a line in ``experiments/__init__.py``.

    Args:
        name: what follows ``python -m experiments reproduce``.
        title: what it shows, in one line.
        seeds: how many seeds the full experiment has.
        cells: maps ``(seeds, quick)`` to the settings of every cell, in the order they are computed. Settings are plain
            JSON values, hold everything a cell depends on, and have a ``"seed"``.
        compute: returns a cell's rows from its settings, and from nothing else.
        tables: returns Markdown from the rows of all finished cells (columns: the settings and those of ``compute``).
        naming: the settings that a cell's file is named after.
        plots: returns plots of the same rows; none if the tables are enough.
    """

    name: str
    title: str
    seeds: int
    cells: Callable[[int, bool], Sequence[Settings]]
    compute: Callable[[Settings], list[Row]]
    tables: Callable[[pd.DataFrame], str]
    naming: tuple[str, ...]
    plots: Callable[[pd.DataFrame], list[Plot]] = lambda _: []

    def file(self, settings: Settings) -> str:
        """Name a cell's file: readable, and different as soon as any setting differs."""
        words = "-".join(str(settings[key]) for key in self.naming)
        mark = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        return f"{words.replace('/', '_').replace(' ', '_')}-{mark}.json"
