"""Groups left out together: estimates compared with real retraining."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch

from experiments.reproduce.fidelity import METHODS
from experiments.reproduce.markdown import spread, table
from experiments.reproduce.plots import Panel, Plot, Series
from experiments.reproduce.problems import QUIET, binary
from experiments.reproduce.spec import Row, Settings, Spec
from experiments.reproduce.tables import QUICK, SETTINGS, SHOWN
from leaveout.estimators import ACC, SGDIE, Replay, score
from leaveout.evaluate.metrics import rmse, spearman

SHARES = (0.05, 0.2)
MODELS = {"logistic": "logistic", "mlp": "8-8 network"}


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List a run for each seed, data set and model; its groups of all sizes are scored together."""
    return [
        {
            "data": data,
            "model": model,
            "noise": "clean",
            "level": 0.0,
            **(QUICK if quick else SETTINGS),
            "groups": 20 if quick else 60,
            "shares": list(SHARES),
            "seed": seed,
        }
        for seed in range(seeds)
        for data in ("adult", "20news", "mnist-1v7")
        for model in MODELS
    ]


def compute(settings: Settings) -> list[Row]:
    """Return a row for each group size and method, with the values behind it for seed 0."""
    chosen = drawn(settings["n"], settings["shares"], settings["groups"], settings["seed"])
    with binary(settings) as problem:
        question = (problem.run, problem.task, problem.val)
        methods = [SGDIE(), ACC("free"), ACC("free", "outputs"), ACC("exact"), ACC("exact", "exact")]
        estimates = {
            scores.method: scores.mean() for scores in score(methods, *question, groups=chosen, resources=QUIET)
        }
        truth = Replay().score(*question, groups=chosen, resources=QUIET).mean()
    rows: list[Row] = []
    for place, share in enumerate(settings["shares"]):
        part = slice(place * settings["groups"], (place + 1) * settings["groups"])
        for method in METHODS:
            estimate, true = estimates[method][part], truth[part]
            row: Row = {"share": share, "method": method, "spread": float(true.double().std())}
            row |= {"spearman": spearman(estimate, true), "rmse": rmse(estimate, true)}
            if settings["seed"] == 0:
                row |= {"estimate": estimate.tolist(), "truth": true.tolist()}
            rows.append(row)
    return rows


def drawn(n: int, shares: Sequence[float], count: int, seed: int) -> dict[str, list[int]]:
    """Draw random groups: ``count`` of each share of the examples, all of one share before the next.

    >>> [len(group) for group in drawn(40, (0.05, 0.2), 2, seed=0).values()]
    [2, 2, 8, 8]
    """
    order = torch.Generator().manual_seed(seed)
    return {
        f"{share}-{number}": torch.randperm(n, generator=order)[: round(share * n)].tolist()
        for share in shares
        for number in range(count)
    }


def tables(frame: pd.DataFrame) -> str:
    """Tabulate Spearman and RMSE for both sizes side by side."""
    rows = []
    for (model, data), part in frame.groupby(["model", "data"], sort=False):
        for method, own in part.groupby("method", sort=False):
            sizes = [own[own["share"] == share] for share in SHARES]
            shown = [spread(size["spearman"]) for size in sizes] + [spread(size["rmse"], small=True) for size in sizes]
            rows.append([MODELS[str(model)], SHOWN[str(data)], str(method), *shown, str(own["seed"].nunique())])
    head = [f"{metric}, {share:.0%}" for metric in ("Spearman", "RMSE") for share in SHARES]
    return f"{SETTING}\n\n" + table(["model", "data", "method", *head, "seeds"], rows)


def plots(frame: pd.DataFrame) -> list[Plot]:
    """Plot estimate against truth for every group of seed 0."""
    first_seed = frame[frame["seed"] == 0]
    pictures = []
    for model, part in first_seed.groupby("model", sort=False):
        panels = []
        for (share, data), own in part.groupby(["share", "data"], sort=False):
            clouds = [
                Series(row["method"], row["truth"], row["estimate"], METHODS.index(row["method"]), points=True)
                for _, row in own.iterrows()
            ]
            title = f"{SHOWN[str(data)]}, groups of {float(str(share)):.0%}"
            panels.append(Panel(title, clouds, "true change of the loss", "estimate", diagonal=True))
        panels.sort(key=lambda panel: panel.title.split(" of ")[1] == f"{SHARES[1]:.0%}")
        pictures.append(
            Plot(f"scatter-{model}", f"Groups, {MODELS[str(model)]}: estimate against truth, seed 0", panels)
        )
    return pictures


SETTING = """Random groups of 5% and of 20% of 400 examples, 60 of each, left out at once; the settings of the big
tables. SGD-IE of a group is the sum of its examples' scores. The truth is training again without the group. Mean
(standard deviation) over seeds."""

GROUPS = Spec(
    "groups",
    "Groups: many examples left out at once",
    seeds=5,
    cells=cells,
    compute=compute,
    tables=tables,
    plots=plots,
    naming=("data", "model", "seed"),
)
