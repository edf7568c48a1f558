"""The effect of the curvature of kinks on the jump: ReLU networks trained with Adam, against exact replays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from experiments.reproduce import kinks
from experiments.reproduce.kinks import PAIR, compared, gained, plotted, runs, tabulated
from experiments.reproduce.plots import Plot
from experiments.reproduce.spec import Row, Settings, Spec
from leaveout.estimators import ACC, SGDIE, Estimator
from leaveout.sweep.kink_size import LARGEST_DIVIDED

ADAM: dict[str, Any] = {"optimizer": "adam", "epochs": 15}
DIGITS: dict[str, Any] = {**kinks.DIGITS, **ADAM}
TABLE: dict[str, Any] = {**PAIR, **ADAM, "lr": 0.001, "n": 200}
NETWORKS: dict[str, dict[str, Any]] = {
    "digits 64-12-10, 0.01": {**DIGITS, "hidden": [12], "lr": 0.01},
    "digits 64-12-10, 0.001": {**DIGITS, "hidden": [12], "lr": 0.001},
    "digits 64-16-10, AdamW 0.003": {**DIGITS, "hidden": [16], "lr": 0.003, "optimizer": "adamw", "betas": [0.9, 0.95]},
    "digits 64-64-10, 0.003": {**DIGITS, "hidden": [64], "lr": 0.003},
    "digits 64-32-32-10, 0.003": {**DIGITS, "hidden": [32, 32], "lr": 0.003},
    "digits 64-64-64-10, 0.001": {**DIGITS, "hidden": [64, 64], "lr": 0.001},
    "Adult 8-8, 0.001": {**TABLE, "data": "adult"},
    "Adult 8-8, 0.01": {**TABLE, "data": "adult", "lr": 0.01},
    "20News 8-8, 0.001": {**TABLE, "data": "20news"},
    "MNIST 1v7 8-8, 0.001": {**TABLE, "data": "mnist-1v7"},
    "MNIST 784-32-32-10, 0.001": {**DIGITS, "data": "mnist", "hidden": [32, 32], "lr": 0.001, "scaled": True},
    "MNIST conv-conv-fc, 0.003": {**kinks.NETWORKS["MNIST conv-conv-fc"], "optimizer": "adam", "lr": 0.003},
}
MAIN, OTHER = "ACC(jump)", "SGD-IE"
METHODS: dict[str, Estimator] = {
    "SGD-IE": SGDIE(),
    "SGD-IE(kinks)": SGDIE(kinks=True),
    "ACC(jump)": ACC("jump"),
    "ACC(jump, kinks)": ACC("jump", kinks=True),
}


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List a run for each seed and network."""
    return runs(NETWORKS, seeds, quick)


def compute(settings: Settings) -> list[Row]:
    """Compute a row per method: its agreement with the truth, and the size of the kinks."""
    return compared(settings, METHODS)


def tables(frame: pd.DataFrame) -> str:
    """Tabulate a row per network."""
    return f"{SETTING}\n\n{tabulated(frame, _gained(frame), MAIN, OTHER)}"


def plots(frame: pd.DataFrame) -> list[Plot]:
    """Plot tau with kinks against tau without, a point per run."""
    return plotted(_gained(frame), MAIN)


def _gained(frame: pd.DataFrame) -> pd.DataFrame:
    return gained(frame, (MAIN, OTHER), LARGEST_DIVIDED)


SETTING = """ReLU networks, Adam or AdamW at the rate named, float64; tau is Kendall's, with exact replays of every
example (of 100 for the convolutional network), mean loss of the queries. 200 examples, batch 50, 15 epochs (512, 64
and 6 for the convolutional network, which pools by averages); 8-8 networks have one logit. RMSE is divided by the
standard deviation of the truth. The jump is read with the vector that Hessian products carry; with kinks, a leap of
the gradient counts as far as it can move Adam's step. The size of kinks is how much of a vector they can change in one
step, which three quarters of eight steps reach; with Adam `kinks="auto"` leaves them without curvature from 0.07 on.
That rule was chosen on seeds 0 and 1; other seeds test it. Mean (standard deviation) over seeds."""

ADAM_KINKS = Spec(
    "adam-kinks",
    "Kinks with Adam: the jump, carried by Hessian products in which ReLU has curvature",
    seeds=5,
    cells=cells,
    compute=compute,
    tables=tables,
    plots=plots,
    naming=("network", "seed"),
)
