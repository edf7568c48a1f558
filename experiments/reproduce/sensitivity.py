"""The effect of settings that the publication does not specify: L2, learning rate, batch size, precision."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from experiments.reproduce.fidelity import compute
from experiments.reproduce.markdown import spread, table
from experiments.reproduce.spec import Settings, Spec
from experiments.reproduce.tables import COLUMNS, QUICK, SETTINGS, SHOWN

CHANGES: tuple[dict[str, object], ...] = (
    {},
    {"l2": 0.0},
    {"l2": 0.001},
    {"lr": 0.01},
    {"batch": 20},
    {"dtype": "float64"},
)


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List one setting changed at a time, clean data; seeds are the outer loop."""
    usual, changes = (QUICK, CHANGES[:2]) if quick else (SETTINGS, CHANGES)
    return [
        {"data": data, "model": model, "noise": "clean", "level": 0.0, **usual, **change, "seed": seed}
        for seed in range(seeds)
        for change in changes
        for data in ("adult", "mnist-1v7", "20news")
        for model in ("logistic", "mlp")
        # Without the longest and least informative cells: precision and small batches of the network.
        if not (model == "mlp" and data != "adult" and change.keys() & {"batch", "dtype"})
    ]


def tables(frame: pd.DataFrame) -> str:
    """Tabulate each change, data set, model and method."""
    usual = SETTINGS if int(frame["n"].iloc[0]) == SETTINGS["n"] else QUICK
    rows = []
    keys = ["model", "data", "l2", "lr", "batch", "dtype"]
    for values, part in frame.groupby(keys, sort=True):
        where = dict(zip(keys, values, strict=True))
        changed = [f"{name} {where[name]}" for name in keys[2:] if where[name] != usual[name]]
        for method, own in part.groupby("method", sort=False):
            shown = [spread(own[column], small=column == "rmse") for column in COLUMNS]
            place = ["logistic" if where["model"] == "logistic" else "8-8", SHOWN[str(where["data"])]]
            rows.append(
                [*place, ", ".join(changed) or "as in the tables", str(method), *shown, str(own["seed"].nunique())]
            )
    head = ["model", "data", "changed", "method", *COLUMNS.values(), "seeds"]
    return "Clean data, the settings of the tables with one changed at a time.\n\n" + table(head, rows)


SENSITIVITY = Spec(
    "sensitivity",
    "Sensitivity: L2, learning rate, batch size and precision",
    seeds=3,
    cells=cells,
    compute=compute,
    tables=tables,
    naming=("data", "model", "l2", "lr", "batch", "dtype", "seed"),
)
