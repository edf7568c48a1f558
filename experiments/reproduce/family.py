"""The whole family of estimators on the same runs: the two published tables, and one table of everything."""

from __future__ import annotations

from collections.abc import Sequence
from time import process_time

import pandas as pd

from experiments.reproduce.fidelity import PERCENTS, agreement
from experiments.reproduce.markdown import number, spread, table
from experiments.reproduce.problems import QUIET, binary
from experiments.reproduce.spec import Row, Settings, Spec
from experiments.reproduce.tables import QUICK, SETTINGS, SHOWN
from leaveout.estimators import ACC, SGDIE, AdamIE, DVEmb, Estimator, InfluenceFunction, Replay, TracIn

FAMILY_METHODS: tuple[Estimator, ...] = (
    TracIn(),
    TracIn("epochs"),
    DVEmb("fisher"),
    DVEmb("fisher", acc=True, transport="exact"),
    DVEmb("ggn"),
    DVEmb("ggn", acc=True, transport="exact"),
    SGDIE(),
    ACC("exact"),
)
ADAM_METHODS: tuple[Estimator, ...] = (AdamIE(), AdamIE(acc=True), TracIn(), SGDIE(), ACC("exact"))
PUBLISHED = {
    (4, "TracIn"): (0.8167, 0.7949, 0.6598, 0.6783, 0.5686),
    (4, "DVEmb"): (0.7772, 0.7445, 0.6529, 0.6216, 0.4815),
    (4, "ACC-DVEmb"): (0.8463, 0.8123, 0.7241, 0.7021, 0.5686),
    (16, "TracIn"): (0.6705, 0.6867, 0.5564, 0.4815, 0.4815),
    (16, "DVEmb"): (0.7073, 0.7021, 0.6260, 0.5094, 0.4545),
    (16, "ACC-DVEmb"): (0.7225, 0.7125, 0.6327, 0.5190, 0.5094),
    (32, "TracIn"): (-0.1475, 0.5013, 0.2862, 0.1483, 0.1111),
    (32, "DVEmb"): (0.6662, 0.6667, 0.5504, 0.5287, 0.5094),
    (32, "ACC-DVEmb"): (0.7011, 0.7125, 0.6129, 0.5686, 0.5332),
}
"""Kendall's tau and Jaccard 70, 50, 30, 10, as printed in "Accumulative SGD Influence Estimation"."""

PUBLISHED_ADAM = {
    "Adam-IE": (None, 0.5427, 0.4085, 0.1840, 0.0390),
    "ACC-Adam-IE": (None, 0.5699, 0.4337, 0.2060, 0.0390),
}
COLUMNS = {"kendall": "tau", **{f"jaccard@{percent}": f"J@{percent}" for percent in PERCENTS}}
MODELS = {"logistic": "logistic", "mlp": "8-8 network"}

EVERYTHING: tuple[Estimator, ...] = (
    TracIn(),
    TracIn("epochs"),
    InfluenceFunction("cg"),
    InfluenceFunction("cg", damping=0.1),
    DVEmb("fisher"),
    DVEmb("ggn"),
    DVEmb("ggn", acc=True),
    SGDIE(),
    SGDIE("outputs"),
    ACC("free"),
    ACC("free", probability=0.5),
    ACC("free", epochs=15),
    ACC("subspace"),
    ACC("exact"),
    ACC("free", "outputs"),
    ACC("exact", "exact"),
)
TASKS = (("adult", "logistic"), ("20news", "logistic"), ("mnist-1v7", "logistic"), ("mnist-1v7", "mlp"))


def compute(settings: Settings) -> list[Row]:
    """Compute a row per method: agreement with exact replay, time relative to the replay, and products."""
    methods = EVERYTHING if settings["optimizer"] == "sgd" and settings["whole"] else FAMILY_METHODS
    methods = methods if settings["optimizer"] == "sgd" else ADAM_METHODS
    rows: list[Row] = []
    with binary(settings) as problem:
        question = (problem.run, problem.task, problem.val)
        start = process_time()
        truth = Replay().score(*question, resources=QUIET)
        replaying = process_time() - start
        for method in methods:
            if isinstance(method, InfluenceFunction) and (settings["model"] == "mlp") != (method.damping > 0):
                continue  # a network's Hessian is not positive definite, and logistic regression needs no damping
            start = process_time()  # does not count other work on the machine
            scores = method.score(*question, resources=QUIET)
            time = (process_time() - start) / replaying
            rows.append({"method": scores.method, **agreement(scores.mean(), truth.mean()), "time": time,
                         "hvps": scores.cost.hvps, "gradients": scores.cost.gradients})  # fmt: skip
    return rows


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List MNIST 1 against 7 with both models; SGD for 4, 16 and 32 epochs, Adam for 4."""
    usual = QUICK if quick else SETTINGS
    trained = [("sgd", 0.1, epochs) for epochs in ((2, 4) if quick else (4, 16, 32))]
    trained += [("adam", rate, 2 if quick else 4) for rate in (0.1, 0.001)]
    return [
        {"data": "mnist-1v7", "model": model, "noise": "clean", "level": 0.0, **usual, "optimizer": optimizer,
         "lr": rate, "epochs": epochs, "whole": False, "seed": seed}
        for seed in range(seeds)
        for model in MODELS
        for optimizer, rate, epochs in trained
    ]  # fmt: skip


def every_cell(seeds: int, quick: bool) -> Sequence[Settings]:
    """List four tasks with SGD, and the same with Adam."""
    usual = QUICK if quick else SETTINGS
    return [
        {"data": data, "model": model, "noise": "clean", "level": 0.0, **usual, "optimizer": optimizer,
         "lr": 0.1 if optimizer == "sgd" else 0.01, "whole": True, "seed": seed}
        for seed in range(seeds)
        for data, model in TASKS
        for optimizer in ("sgd", "adam")
    ]  # fmt: skip


def tables(frame: pd.DataFrame) -> str:
    """Tabulate our figures and the published ones."""
    rows = []
    keys = ["optimizer", "model", "lr", "epochs"]
    for (optimizer, model, lr, epochs), part in frame.groupby(keys, sort=False):
        where = [MODELS[str(model)], f"{str(optimizer).upper() if optimizer == 'sgd' else 'Adam'} {lr:g}", str(epochs)]
        for method, own in part.groupby("method", sort=False):
            rows.append([*where, str(method), *(spread(own[c]) for c in COLUMNS), str(own["seed"].nunique())])
    for (epochs, method), values in PUBLISHED.items():
        rows.append(["*paper*", "*SGD 0.1*", f"*{epochs}*", f"*{method}*", *(f"*{number(v)}*" for v in values), "*5*"])
    for method, figures in PUBLISHED_ADAM.items():
        shown = ["-" if v is None else f"*{number(v)}*" for v in figures]
        rows.append(["*paper*", "*Adam*", "*4*", f"*{method}*", *shown, "*5*"])
    head = ["model", "optimizer", "epochs", "method", *COLUMNS.values(), "seeds"]
    return f"{SETTING}\n\n" + table(head, rows)


def every_table(frame: pd.DataFrame) -> str:
    """Tabulate a row per method, a column per task: tau (RMSE over the spread of the true scores), then time."""
    shown = []
    for optimizer, of_optimizer in frame.groupby("optimizer", sort=False):
        rows = []
        for method, part in of_optimizer.groupby("method", sort=False):
            line = [str(method)]
            for data, model in TASKS:
                own = part[(part["data"] == data) & (part["model"] == model)]
                size = (own["rmse"] / own["spread"]).mean()
                line.append(f"{number(own['kendall'].mean())} ({number(size)})" if len(own) else "-")
            times = part["time"]
            rows.append([*line, f"{times.min():.3f} to {times.max():.3f}"])
        head = [f"{SHOWN[data]}, {MODELS[model]}" for data, model in TASKS]
        name = "SGD, learning rate 0.1" if optimizer == "sgd" else "Adam, learning rate 0.01"
        counts = sorted(of_optimizer.groupby(["data", "model"])["seed"].nunique().unique())
        seeds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        shown.append(f"### {name} ({seeds} seeds per task)\n\n" + table(["method", *head, "time / Replay's"], rows))
    return f"{EVERY_SETTING}\n\n" + "\n\n".join(shown)


SETTING = """MNIST 1 against 7: 400 training and 400 validation examples, batch 100, L2 0.01 in each example's loss. The
publication does not say which model; both are shown. DVEmb(fisher) has the gradient outer products that its authors
compute with, DVEmb(ggn) the Gauss-Newton matrix. The truth is exact replay; mean (standard deviation) over seeds."""

EVERY_SETTING = """Kendall's tau with exact replay, and in brackets the RMSE over the standard deviation of the true
scores (0: exact; 1: no better than a constant; Adam-IE is a cosine, so that its size means nothing). 400 training and
400 validation examples, batch 100, 30 epochs, L2 0.01. Processor time over that of replaying all 400."""

FAMILY = Spec("family", "The family: TracIn, DVEmb and Adam-IE with the correction", 5, cells, compute, tables,
              ("model", "optimizer", "lr", "epochs", "seed"))  # fmt: skip
METHODS = Spec("methods", "All methods on the same four tasks", 3, every_cell, compute, every_table,
               ("data", "model", "optimizer", "seed"))  # fmt: skip
