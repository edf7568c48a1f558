"""What the curvature of kinks does to SGD-IE: ReLU networks, with and without it, compared with exact replays."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.utils.data import TensorDataset

from leaveout.builtin import data
from leaveout.estimators import ACC, SGDIE, Estimator, Replay
from leaveout.evaluate.metrics import kendall, rmse
from leaveout.paper.reproduce.markdown import spread, table
from leaveout.paper.reproduce.networks import Trained, network, trained
from leaveout.paper.reproduce.problems import QUIET, Problem, binary
from leaveout.paper.reproduce.spec import Row, Settings, Spec

BASE: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "batch": 50, "epochs": 20, "dtype": "float64", "replays": None}
DIGITS: dict[str, Any] = {**BASE, "data": "digits", "n": 200, "queries": 200, "activation": "relu"}
PAIR: dict[str, Any] = {**BASE, "model": "mlp", "noise": "clean", "level": 0.0, "l2": 0.0}
PAPER = {"n": 400, "batch": 100, "epochs": 30}
NETWORKS: dict[str, dict[str, Any]] = {
    "digits 64-12-10": {**DIGITS, "hidden": [12]},
    "digits 64-8-8-10": {**DIGITS, "hidden": [8, 8]},
    "digits 64-64-10": {**DIGITS, "hidden": [64]},
    "digits 64-32-32-10": {**DIGITS, "hidden": [32, 32], "n": 400},
    "digits 64-64-64-10": {**DIGITS, "hidden": [64, 64], "n": 400},
    "Adult 8-8, n = 200": {**PAIR, "data": "adult", "n": 200},
    "Adult 8-8": {**PAIR, **PAPER, "data": "adult"},
    "20News 8-8": {**PAIR, **PAPER, "data": "20news"},
    "MNIST 1v7 8-8, n = 200": {**PAIR, "data": "mnist-1v7", "n": 200},
    "MNIST 1v7 8-8": {**PAIR, **PAPER, "data": "mnist-1v7"},
    "MNIST conv-conv-fc": {**BASE, "data": "mnist", "n": 512, "queries": 200, "batch": 64, "epochs": 6, "replays": 100},
}
METHODS: dict[str, Estimator] = {
    "SGD-IE": SGDIE(),
    "SGD-IE(kinks)": SGDIE(kinks=True),
    "ACC(free)": ACC("free"),
    "ACC(free, kinks)": ACC("free", kinks=True),
}


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """A run for each seed and network."""
    small = {"n": 60, "epochs": 2, "batch": 20} if quick else {}
    return [{**own, **small, "network": name, "seed": seed} for seed in range(seeds) for name, own in NETWORKS.items()]


@contextmanager
def convolutional(settings: Settings) -> Iterator[Trained]:
    """A recorded run of two convolutions with average pooling on MNIST."""
    dtype = getattr(torch, settings["dtype"])
    loaded = data.load("mnist", settings["n"], settings["queries"], settings["seed"])
    train_set, val = (
        TensorDataset(part.x.view(-1, 1, 28, 28).to(dtype), part.y) for part in (loaded.train, loaded.val)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings["seed"])
        model = nn.Sequential(
            *(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.AvgPool2d(2)),
            *(nn.Conv2d(8, 8, 5), nn.ReLU(), nn.AvgPool2d(2)),
            *(nn.Flatten(), nn.Linear(8 * 4 * 4, 10)),
        ).to(dtype)
    with trained(model, train_set, val, settings) as problem:
        yield problem


def compute(settings: Settings) -> list[Row]:
    """Compute a row per method: its agreement with the truth, and the processor time that scoring took."""
    opened: Any = binary if "model" in settings else network if "hidden" in settings else convolutional
    with opened(settings) as problem:
        asked = (problem.run, problem.task, problem.val)
        ids = range(settings["replays"] or settings["n"])
        truth = Replay().score(*asked, ids=ids, resources=QUIET).mean()
        return [{"method": name, **_measured(one, problem, truth)} for name, one in METHODS.items()]


def _measured(estimator: Estimator, problem: Trained | Problem, truth: torch.Tensor) -> Row:
    seconds = []
    for _ in range(2):  # traces are made once
        start = time.process_time()
        scores = estimator.score(problem.run, problem.task, problem.val, resources=QUIET).mean()[: len(truth)]
        seconds.append(time.process_time() - start)
    error = rmse(scores, truth) / float(truth.double().std())
    return {"kendall": kendall(scores, truth), "relative error": error, "seconds": min(seconds)}


def tables(frame: pd.DataFrame) -> str:
    """A row per network: tau without and with, what it gained, the errors and the time."""
    rows = []
    gains: dict[str, float] = {}
    for name, own in frame.groupby("network", sort=False):
        by = {method: part.set_index("seed").sort_index() for method, part in own.groupby("method")}
        plain, bent = by["SGD-IE"], by["SGD-IE(kinks)"]
        change = bent["kendall"] - plain["kendall"]
        gains[str(name)] = float(change.mean())
        errors = " -> ".join(f"{part['relative error'].median():.2f}" for part in (plain, bent))
        corrected = " -> ".join(f"{by[one]['kendall'].mean():.3f}" for one in ("ACC(free)", "ACC(free, kinks)"))
        ratio = (bent["seconds"] / plain["seconds"]).median()
        shown = [spread(plain["kendall"]), spread(bent["kendall"]), f"{change.mean():+.3f}", f"{change.min():+.3f}"]
        rows.append([str(name), *shown, errors, corrected, f"{ratio:.2f}", str(len(change))])
    head = [
        "network",
        "tau of SGD-IE",
        "with kinks",
        "gain",
        "worst seed",
        "RMSE/sd, median",
        "ACC(free)",
        "time",
        "seeds",
    ]
    worst = min(gains, key=lambda name: gains[name])
    mean = sum(gains.values()) / len(gains)
    summary = f"Mean gain over the networks {mean:+.3f}; the least gain of a network {gains[worst]:+.3f} ({worst})."
    return f"{SETTING}\n\n{table(head, rows)}\n\n{summary}"


SETTING = """ReLU networks, SGD at 0.1, float64; tau is Kendall's, with exact replays of all examples (of 100 for the
convolutional network), mean loss of the queries. Digits: 200 examples (400 with two layers of 32 or 64), batch 50, 20
epochs. 8-8 networks with one logit: 400 examples, batch 100, 30 epochs, or 200, batch 50, 20 epochs. The convolutional
network pools by averages: 512 examples, batch 64, 6 epochs. RMSE is divided by the standard deviation of the truth.
Time is the ratio of processor seconds of scoring; these runs are short, and the plain one is measured first, which
favours the other: ratios below one say only that the difference is small. Mean (standard deviation) over seeds."""

KINKS = Spec(
    "kinks",
    "Kinks: Hessian products in which ReLU has curvature",
    seeds=5,
    cells=cells,
    compute=compute,
    tables=tables,
    naming=("network", "seed"),
)
