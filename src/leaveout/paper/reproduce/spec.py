"""What an experiment is: a list of cells, a function that computes one, and how the results are shown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from leaveout.paper.reproduce.plots import Plot

Settings: TypeAlias = Mapping[str, Any]
Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """One experiment. A new one is a file that makes a ``Spec``, and a line in ``experiments/__init__.py``.

    Args:
        name: what follows ``leaveout reproduce``.
        title: what it shows, in one line.
        seeds: how many seeds the full experiment has.
        cells: ``(seeds, quick)`` to the settings of every cell, in the order they are computed. Settings are plain
            JSON values, hold everything a cell depends on, and have a ``"seed"``.
        compute: a cell's rows from its settings, and from nothing else.
        tables: Markdown from the rows of all finished cells (columns: the settings and what ``compute`` gave).
        naming: the settings that a cell's file is called by.
        plots: pictures from the same rows; none where the tables say it all.
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
        """Name a cell's file: readable, and another one as soon as any setting differs."""
        words = "-".join(str(settings[key]) for key in self.naming)
        mark = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        return f"{words.replace('/', '_').replace(' ', '_')}-{mark}.json"
