"""How the scores hold up over longer training: RMSE and Jaccard@10 after 2, 6, ..., 38 epochs on 20News."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from experiments.reproduce.along import changes, displaced, replayed
from experiments.reproduce.fidelity import METHODS, agreement
from experiments.reproduce.markdown import spread, table
from experiments.reproduce.plots import Panel, Plot, Series
from experiments.reproduce.problems import QUIET, binary
from experiments.reproduce.spec import Row, Settings, Spec
from leaveout.estimators import ACC, SGDIE, score

CONFIGURATIONS = ((20, 0.01), (200, 0.01), (400, 0.01), (400, 0.1), (400, 0.3), (400, 1.0))
MODELS = {"logistic": "logistic", "mlp": "8-8 network"}


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List a run for each seed, model, batch size and learning rate."""
    shared = {"data": "20news", "noise": "clean", "level": 0.0, "l2": 0.01, "dtype": "float32"}
    n, epochs = (100, 10) if quick else (400, 38)
    return [
        {**shared, "model": model, "n": n, "batch": batch * n // 400, "lr": lr, "epochs": epochs, "seed": seed}
        for seed in range(seeds)
        for model in MODELS
        for batch, lr in CONFIGURATIONS
    ]


def compute(settings: Settings) -> list[Row]:
    """Return a row for each epoch count and method; one run serves all epochs."""
    rows: list[Row] = []
    with binary(settings) as problem:
        each = -(-settings["n"] // settings["batch"])
        marks = [epoch * each for epoch in range(2, settings["epochs"] + 1, 4)]
        truth = {step: changes(problem, step, moved, "exact") for step, moved in replayed(problem, marks)}
        for step, moved in displaced(problem, marks, corrected=True):
            estimates = {
                "ACC(exact)": changes(problem, step, moved, "linear"),
                "ACC(exact, exact readout)": changes(problem, step, moved, "exact"),
            }
            cheap = score([SGDIE(), ACC("free")], problem.run.head(step), problem.task, problem.val, resources=QUIET)
            estimates |= {scores.method: scores.mean() for scores in cheap}
            rows += [
                {"epoch": step // each, "method": method, **agreement(values, truth[step])}
                for method, values in estimates.items()
            ]
    return rows


def tables(frame: pd.DataFrame) -> str:
    """Tabulate the first and last epoch of every configuration, and what ACC gains."""
    rows = []
    ends = (int(frame["epoch"].min()), int(frame["epoch"].max()))
    for (model, batch, lr), part in frame.groupby(["model", "batch", "lr"]):
        for method in METHODS:
            own = part[part["method"] == method]
            if own.empty:
                continue
            shown = [
                spread(own[own["epoch"] == epoch][column], small=column == "rmse")
                for column in ("rmse", "jaccard@10")
                for epoch in ends
            ]
            rows.append([MODELS[str(model)], f"{batch}", f"{lr}", method, *shown, str(own["seed"].nunique())])
    head = ["model", "M", "lr", "method"]
    head += [f"{name}, epoch {epoch}" for name in ("RMSE", "J@10") for epoch in ends]
    return f"{SETTING}\n\n{gains(frame)}\n\n{table([*head, 'seeds'], rows)}"


def gains(frame: pd.DataFrame) -> str:
    """Compute by how much ACC's RMSE is below SGD-IE's, at the first and the last epoch."""
    rows = []
    for (model, batch, lr), part in frame.groupby(["model", "batch", "lr"]):
        means = part.groupby(["epoch", "method"])["rmse"].mean().unstack()
        cut = 1 - means.div(means["SGD-IE"], axis=0)
        shown = [f"{float(cut[m].iloc[i]):.0%}" for m in METHODS[1:] if m in cut for i in (0, -1)]
        rows.append([MODELS[str(model)], f"{batch}", f"{lr}", *shown])
    ends = (int(frame["epoch"].min()), int(frame["epoch"].max()))
    head = [f"{m}, epoch {e}" for m in METHODS[1:] if m in set(frame["method"]) for e in ends]
    return "RMSE below SGD-IE's (negative: above):\n\n" + table(["model", "M", "lr", *head], rows)


def plots(frame: pd.DataFrame) -> list[Plot]:
    """Plot RMSE and Jaccard@10 over epochs for every configuration."""
    drawn = []
    for model, part in frame.groupby("model"):
        for column, label in (("rmse", "RMSE"), ("jaccard@10", "Jaccard@10")):
            panels = []
            for (batch, lr), own in part.groupby(["batch", "lr"]):
                lines = [_line(own[own["method"] == m], m, column) for m in METHODS if m in set(own["method"])]
                panels.append(Panel(f"M = {batch}, lr = {lr}", lines, "epochs", label, log_y=column == "rmse"))
            title = f"20News, {MODELS[str(model)]}: {label} over epochs, mean and standard error over seeds"
            drawn.append(Plot(f"{column.replace('@', '')}-{model}", title, panels))
    return drawn


def _line(own: pd.DataFrame, method: str, column: str) -> Series:
    by = own.groupby("epoch")[column]
    mean, error = by.mean(), by.sem().fillna(0.0)
    low, high = (mean - error).clip(lower=mean * 0.1), mean + error
    return Series(method, list(mean.index), list(mean), METHODS.index(method), list(low), list(high))


SETTING = """20News, 400 training and 400 validation examples, L2 0.01, float32; M is the batch size. One run of 38
epochs a seed serves every epoch count. Mean (standard deviation) over seeds."""

EPOCHS = Spec(
    "epochs",
    "Cross-epoch: how the scores hold up as training goes on",
    seeds=10,
    cells=cells,
    compute=compute,
    tables=tables,
    plots=plots,
    naming=("model", "batch", "lr", "seed"),
)
