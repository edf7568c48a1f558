"""Adam on digits: the jump compared with SGD-IE, exact ACC and the jump without saturation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from experiments.reproduce.jumps import ByDerivative, clouds, compared
from experiments.reproduce.markdown import spread, table
from experiments.reproduce.networks import network
from experiments.reproduce.plots import Plot
from experiments.reproduce.problems import QUIET
from experiments.reproduce.spec import Row, Settings, Spec
from leaveout.estimators import ACC, SGDIE, Replay, score

DIGITS: dict[str, Any] = {
    "data": "digits",
    "n": 200,
    "queries": 200,
    "dtype": "float64",
    "optimizer": "adam",
    "batch": 50,
    "epochs": 15,
}
CASES: dict[str, dict[str, Any]] = {
    "softmax, Adam 0.01": {**DIGITS, "hidden": [], "activation": "relu", "lr": 0.01},
    "tanh 64-12-10, Adam 0.01": {**DIGITS, "hidden": [12], "activation": "tanh", "lr": 0.01},
    "tanh 64-12-10, Adam 0.001": {**DIGITS, "hidden": [12], "activation": "tanh", "lr": 0.001},
    "ReLU 64-12-10, Adam 0.01": {**DIGITS, "hidden": [12], "activation": "relu", "lr": 0.01},
}
QUICK: dict[str, Any] = {"n": 40, "queries": 20, "epochs": 2}


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List a run for each seed and case."""
    small = QUICK if quick else {}
    return [{**case, **small, "case": name, "seed": seed} for seed in range(seeds) for name, case in CASES.items()]


def compute(settings: Settings) -> list[Row]:
    """Compute a row per method: Kendall's tau with exact replays of all examples, and RMSE over the truth's spread."""
    with network(settings) as problem:
        asked = (problem.run, problem.task, problem.val)
        truth = Replay().score(*asked, resources=QUIET).values.double().numpy()
        estimates = score([SGDIE(), ByDerivative("jump"), ACC(), ACC("exact")], *asked, resources=QUIET)
    points = settings["seed"] == 0
    return [compared(scores.method, scores.values.double().numpy(), truth, points=points) for scores in estimates]


def tables(frame: pd.DataFrame) -> str:
    """Tabulate a row per case, a column per method."""
    methods = list(dict.fromkeys(frame["method"]))
    rows = []
    for case, own in frame.groupby("case", sort=False):
        each = [own[own["method"] == method] for method in methods]
        shown = [f"{spread(part['kendall'])}; {part['off'].mean():.2f}" for part in each]
        rows.append([str(case), *shown, str(own["seed"].nunique())])
    return f"{SETTING}\n\n" + table(["run", *methods, "seeds"], rows)


def plots(frame: pd.DataFrame) -> list[Plot]:
    """Plot estimate against truth for every example of seed 0."""
    return clouds(frame, "case", "adam", "Digits, Adam")


SETTING = """200 digits, batch 50, 15 epochs, Adam with PyTorch's defaults but for the rate, float64; mean loss of 200
queries. Cells: Kendall's tau with exact replays of all examples, mean (standard deviation) over seeds; RMSE over the
standard deviation of the true scores. SGD-IE on Adam is the metagradient (MAGIC). MNIST networks and the small
GPT are in the table of `python -m experiments reproduce tsloo`, with the same measures."""

ADAM = Spec(
    "adam",
    "Adam: the jump beside its derivative",
    seeds=5,
    cells=cells,
    compute=compute,
    tables=tables,
    naming=("case", "seed"),
    plots=plots,
)
