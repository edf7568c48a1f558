"""TSLOO as in other publications: Spearman with exact replays per query, averaged, for AdamW runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from experiments.reproduce.jumps import clouds, compared, readings
from experiments.reproduce.markdown import spread, table
from experiments.reproduce.networks import network
from experiments.reproduce.plots import Plot
from experiments.reproduce.problems import QUIET
from experiments.reproduce.spec import Row, Settings, Spec
from experiments.reproduce.words import small_gpt
from leaveout.estimators import Replay
from leaveout.trajectory.left_out import leave_out

ADAMW: dict[str, Any] = {"optimizer": "adamw", "betas": [0.9, 0.95], "weight_decay": 0.01, "epochs": 1}
MNIST: dict[str, Any] = {
    "data": "mnist",
    "n": 6000,
    "queries": 100,
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
    "queries": 10,
    "dtype": "float32",
    **ADAMW,
    "batch": 32,
    "replays": 40,
}
CASES: dict[str, dict[str, Any]] = {
    "small GPT, AdamW 0.001": {**GPT, "lr": 1e-3},
    "small GPT, AdamW 0.001, clipped at 0.5": {**GPT, "lr": 1e-3, "clip_norm": 0.5},
    "small GPT, AdamW 0.003": {**GPT, "lr": 3e-3},
    "small GPT, AdamW 0.001, 3 epochs": {**GPT, "lr": 1e-3, "epochs": 3},
    "MNIST, pixels 0 to 1, GELU, AdamW 0.001": {**MNIST, "scaled": False, "activation": "gelu", "lr": 1e-3},
    **{f"MNIST, GELU, AdamW {lr:g}": {**MNIST, "activation": "gelu", "lr": lr} for lr in (1e-3, 1e-4, 1e-5)},
    "MNIST, GELU, AdamW 0.001, float64": {**MNIST, "activation": "gelu", "lr": 1e-3, "dtype": "float64"},
    "MNIST, ReLU, AdamW 0.001": {**MNIST, "activation": "relu", "lr": 1e-3},
}
QUICK: dict[str, Any] = {"n": 100, "queries": 5, "replays": 12}


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List a run for each seed and case."""
    return [
        {**case, **(QUICK if quick else {}), "case": name, "seed": seed}
        for seed in range(seeds)
        for name, case in CASES.items()
    ]


def compute(settings: Settings) -> list[Row]:
    """Compute a row per method: mean Spearman per query, and Kendall's tau and RMSE of the mean loss."""
    order = torch.Generator().manual_seed(settings["seed"])
    ids = torch.randperm(settings["n"], generator=order)[: settings["replays"]].tolist()
    with (small_gpt if settings["data"] == "20news words" else network)(settings) as problem:
        truth = (
            Replay()
            .score(problem.run, problem.task, problem.val, ids=ids, queries="each", resources=QUIET)
            .values.double()
            .numpy()
        )
        estimates = readings(problem, {"": leave_out(settings["n"], ids)})[""]
    points = settings["seed"] == 0
    return [compared(method, values, truth, points=points) for method, values in estimates.items()]


def tables(frame: pd.DataFrame) -> str:
    """Tabulate a row per case and method."""
    rows = []
    for (case, method), own in frame.groupby(["case", "method"], sort=False):
        shown = [spread(own["per_query"]), spread(own["kendall"]), spread(own["off"])]
        rows.append([str(case), str(method), *shown, str(own["seed"].nunique())])
    head = ["run", "method", "TSLOO, mean Spearman per query", "tau, mean loss", "RMSE over sd", "seeds"]
    return f"{SETTING}\n\n" + table(head, rows)


def plots(frame: pd.DataFrame) -> list[Plot]:
    """Plot estimate against truth of the mean loss for seed 0."""
    return clouds(frame, "case", "tsloo", "Single examples, AdamW")


SETTING = """Small GPT: 58,496 parameters, 500 words, the first 33 words of 1,000 messages of 20News, batch 32, 40 left
out, 10 queries. MNIST: 784-16-16-10, 6,000 images scaled to mean 0 and variance 1 but for one row, one epoch of 64, 200
left out, 100 queries. AdamW with betas 0.9, 0.95, weight decay 0.01 and PyTorch's default eps of 1e-8; float32 but for
one row. One example at a time is left out of the recorded trajectory. Three readings of one backward sweep: SGD-IE,
which is the metagradient (MAGIC); the jump, `ACC()`'s default; and the jump whose change of Adam's moments is read by
their derivative, without saturation. Mean (standard deviation) over seeds."""

TSLOO = Spec(
    "tsloo",
    "TSLOO: single examples, query by query, with AdamW",
    seeds=3,
    cells=cells,
    compute=compute,
    tables=tables,
    naming=("case", "seed"),
    plots=plots,
)
