"""What makes a training smooth in its examples' weights: one setting changed at a time, on digits networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from experiments.reproduce.markdown import spread, table
from experiments.reproduce.networks import network
from experiments.reproduce.problems import QUIET
from experiments.reproduce.spec import Row, Settings, Spec
from leaveout.estimators import SGDIE, Replay
from leaveout.evaluate.metrics import kendall
from leaveout.evaluate.smoothness import smoothness

BASE: dict[str, Any] = {
    "data": "digits",
    "n": 500,
    "queries": 200,
    "hidden": [32, 32],
    "dtype": "float64",
    "replays": 100,
    "epochs": 20,
    "batch": 50,
    "activation": "relu",
    "schedule": "constant",
    "weight_decay": 0.0,
}
TRAININGS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": "sgd", "lr": 0.2, "eps": None},
    "Adam": {"optimizer": "adam", "lr": 0.01, "eps": 1e-8},
    "Adam, GELU": {"optimizer": "adam", "lr": 0.01, "eps": 1e-8, "activation": "gelu"},
}
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a quarter of the learning rate": {"lr": 0.25},
    "GELU": {"activation": "gelu"},
    "four times the batch": {"batch": 200},
    "a rate that falls to zero": {"schedule": "linear"},
    "weight decay 0.01": {"weight_decay": 0.01},
    "eps 1e-4": {"eps": 1e-4},
}


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List a run for each seed, optimizer and change; only Adam has eps."""
    small = {"n": 100, "epochs": 4} if quick else {}
    return [
        {**BASE, **usual, **_applied(usual, change), **small, "training": training, "change": what, "seed": seed}
        for seed in range(seeds)
        for training, usual in TRAININGS.items()
        for what, change in CHANGES.items()
        if not ("eps" in change and usual["eps"] is None) and not ("activation" in change and "activation" in usual)
    ]


def _applied(usual: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {key: usual["lr"] * value if key == "lr" else value for key, value in change.items()}


def compute(settings: Settings) -> list[Row]:
    """Compute metasmoothness and growth of the run, and how SGD-IE ranks its examples."""
    with network(settings) as problem:
        asked = (problem.run, problem.task)
        measured = smoothness(*asked, resources=QUIET)
        truth = Replay().score(*asked, problem.val, ids=range(settings["replays"]), resources=QUIET).mean()
        scores = SGDIE().score(*asked, problem.val, resources=QUIET).mean()[: settings["replays"]]
    growth = min(measured.growth, 1e300)
    return [{"agreement": measured.agreement, "growth": growth, "kendall": kendall(scores, truth)}]


def tables(frame: pd.DataFrame) -> str:
    """Tabulate a row per optimizer and change, what helped most first."""
    rows = []
    for training, part in frame.groupby("training", sort=False):
        changes = sorted(part.groupby("change", sort=False), key=lambda own: -own[1]["agreement"].mean())
        for change, own in changes:
            shown = [spread(own["agreement"]), f"{own['growth'].median():.1f}", spread(own["kendall"])]
            rows.append([str(training), str(change), *shown, str(own["seed"].nunique())])
    head = ["training", "changed", "metasmoothness", "growth, median", "tau of SGD-IE", "seeds"]
    return f"{SETTING}\n\n" + table(head, rows)


SETTING = """500 digits, 64-32-32-10 with ReLU (or GELU), batch 50, 20 epochs, SGD at 0.2 or Adam at 0.01, one setting
changed at a time. Metasmoothness by `lo.smoothness` (four directions, a step as long as leaving one example out); tau
of SGD-IE with exact replays of 100 examples, mean loss of 200 queries. Mean (standard deviation) over seeds."""

SMOOTHNESS = Spec(
    "smoothness",
    "Smoothness: what makes single examples' effects linear",
    seeds=3,
    cells=cells,
    compute=compute,
    tables=tables,
    naming=("training", "change", "seed"),
)
