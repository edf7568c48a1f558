"""TSLOO as others measure it: Spearman with exact replays per query, averaged, for AdamW runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from leaveout.estimators import ACC, SGDIE, Replay, TracIn, score
from leaveout.evaluate.metrics import kendall
from leaveout.evaluate.metrics.per_query import PerQuery, spearman_columns
from leaveout.paper.reproduce.markdown import spread, table
from leaveout.paper.reproduce.networks import network
from leaveout.paper.reproduce.problems import QUIET
from leaveout.paper.reproduce.spec import Row, Settings, Spec
from leaveout.paper.reproduce.words import small_gpt

ADAMW: dict[str, Any] = {"optimizer": "adamw", "betas": [0.9, 0.95], "weight_decay": 0.01, "epochs": 1}
MNIST: dict[str, Any] = {
    "data": "mnist",
    "n": 6000,
    "queries": 500,
    "scaled": True,
    "hidden": [16, 16],
    "dtype": "float32",
    **ADAMW,
    "batch": 64,
    "replays": 200,
}
GPT: dict[str, Any] = {
    "data": "20news words",
    "n": 1000,
    "queries": 50,
    "dtype": "float32",
    **ADAMW,
    "batch": 32,
    "replays": 100,
}
CASES: dict[str, dict[str, Any]] = {
    **{f"MNIST, GELU, AdamW {lr:g}": {**MNIST, "activation": "gelu", "lr": lr} for lr in (1e-3, 1e-4, 1e-5)},
    "MNIST, ReLU, AdamW 0.001": {**MNIST, "activation": "relu", "lr": 1e-3},
    "small GPT, AdamW 0.001": {**GPT, "lr": 1e-3},
    "small GPT, AdamW 0.001, 3 epochs": {**GPT, "lr": 1e-3, "epochs": 3},
    "small GPT, AdamW 0.003": {**GPT, "lr": 3e-3},
}
QUICK: dict[str, Any] = {"n": 100, "queries": 5, "replays": 12}


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """A run for each seed and case."""
    return [
        {**case, **(QUICK if quick else {}), "case": name, "seed": seed}
        for seed in range(seeds)
        for name, case in CASES.items()
    ]


def compute(settings: Settings) -> list[Row]:
    """A row per method: mean Spearman per query, and Kendall's tau of the mean loss."""
    order = torch.Generator().manual_seed(settings["seed"])
    ids = torch.randperm(settings["n"], generator=order)[: settings["replays"]].tolist()
    with (small_gpt if settings["data"] == "20news words" else network)(settings) as problem:
        asked = (problem.run, problem.task, problem.val)
        truth = Replay().score(*asked, ids=ids, queries="each", resources=QUIET)
        methods = [ACC(), SGDIE(), TracIn()]
        estimates = score(methods, *asked, ids=ids, queries="each", resources=QUIET)
    exact = truth.values.double().numpy()
    rows = []
    for scores in estimates:
        per_query = PerQuery("TSLOO", spearman_columns(scores.values.double().numpy(), exact), len(ids))
        tau = kendall(scores.mean(), truth.mean())
        rows.append({"method": scores.method, "tsloo": per_query.value, "kendall": tau, "took": scores.cost.seconds})
    return rows


def tables(frame: pd.DataFrame) -> str:
    """A row per case and method."""
    rows = []
    for (case, method), own in frame.groupby(["case", "method"], sort=False):
        shown = [spread(own["tsloo"]), spread(own["kendall"]), f"{own['took'].mean():.1f}"]
        rows.append([str(case), str(method), *shown, str(own["seed"].nunique())])
    head = ["run", "method", "TSLOO, mean Spearman per query", "tau, mean loss", "seconds", "seeds"]
    return f"{SETTING}\n\n" + table(head, rows)


SETTING = """MNIST: 784-16-16-10, 6,000 images scaled to mean 0 and variance 1, one epoch of 64, 200 left out, 500
queries. Small GPT: 58,496 parameters, 500 words, the first 33 words of 1,000 messages of 20News, batch 32, 100 left
out, 50 queries. AdamW with betas 0.9, 0.95 and weight decay 0.01. One example at a time is left out of the recorded
trajectory. ACC reads the jump, which shares SGD-IE's sweep: their seconds are those of both. Mean (standard deviation)
over seeds."""

TSLOO = Spec(
    "tsloo",
    "TSLOO: single examples, query by query, with AdamW",
    seeds=3,
    cells=cells,
    compute=compute,
    tables=tables,
    naming=("case", "seed"),
)
