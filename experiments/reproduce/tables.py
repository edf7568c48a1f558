"""The two big tables: logistic regression (convex) and the 8-8 network (nonconvex), clean and with noise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pandas as pd

from experiments.reproduce import paper
from experiments.reproduce.fidelity import METHODS, PERCENTS, compute
from experiments.reproduce.markdown import number, spread, table
from experiments.reproduce.plots import Panel, Plot, Series
from experiments.reproduce.spec import Settings, Spec

SETTINGS = {"n": 400, "batch": 100, "lr": 0.1, "epochs": 30, "l2": 0.01, "dtype": "float32"}
QUICK = {**SETTINGS, "n": 60, "batch": 20, "epochs": 6}
NOISE = {
    "adult": (("clean", 0.0), ("feature", 0.01), ("feature", 0.05), ("label", 0.1), ("label", 0.3)),
    "20news": (("clean", 0.0), ("feature", 0.0025), ("label", 0.1), ("label", 0.3)),
    "mnist-1v7": (("clean", 0.0), ("feature", 0.01), ("feature", 0.05), ("label", 0.1), ("label", 0.3)),
}
SHOWN = {"adult": "Adult", "20news": "20News", "mnist-1v7": "MNIST", "digits-1v7": "digits"}
COLUMNS = {"rmse": "RMSE", "kendall": "tau", **{f"jaccard@{percent}": f"J@{percent}" for percent in PERCENTS}}
SETTING = """400 training and 400 validation examples, batch 100, learning rate 0.1, 30 epochs, L2 0.01 in each
example's loss, float32. A seed draws the split, the noise, the initial weights and the order of the batches. The truth
is exact replay without each example. Mean (standard deviation) over seeds; the best of ours is bold; the published
figures are in italics."""


def cells(model: str, seeds: int, quick: bool) -> Sequence[Settings]:
    """List every data set and noise; seeds are the outer loop, so that partial results make a fair table."""
    return [
        {"data": name, "model": model, "noise": noise, "level": level, **(QUICK if quick else SETTINGS), "seed": seed}
        for seed in range(seeds)
        for name in NOISE
        for noise, level in NOISE[name]
    ]


def spec(name: str, model: str, title: str) -> Spec:
    """Build one of the tables."""
    return Spec(
        name,
        title,
        seeds=20,
        cells=lambda seeds, quick: cells(model, seeds, quick),
        compute=compute,
        tables=partial(tables, name),
        plots=partial(plots, name),
        naming=("data", "noise", "level", "seed"),
    )


def tables(name: str, frame: pd.DataFrame) -> str:
    """Write the table beside the published one, and say where the correction helps."""
    return f"{SETTING}\n\n{summary(frame)}\n\n{full(name, frame)}"


def full(name: str, frame: pd.DataFrame) -> str:
    """Tabulate every data set, noise and method: mean (std) over seeds, our best bold, the published in italics."""
    rows = []
    for (data, noise, level), part in frame.groupby(["data", "noise", "level"], sort=False):
        where = [SHOWN[str(data)], named(str(noise), level)]
        means = part.groupby("method")[list(COLUMNS)].mean()
        for method, own in part.groupby("method", sort=False):
            shown = [
                f"**{text}**" if means[column][str(method)] == best(means[column]) else text
                for column in COLUMNS
                for text in [spread(own[column], small=column == "rmse")]
            ]
            rows.append([*where, str(method), *shown, str(own["seed"].nunique())])
        for method in ("SGD-IE", "ACC-SGD-IE"):
            published = paper.figure(name, str(data), str(noise), float(str(level)), method)
            shown = [
                f"{number(published[c], c == 'rmse')} ({number(published[f'{c}_std'], c == 'rmse')})" for c in COLUMNS
            ]
            rows.append([*where, f"*paper: {method}*", *[f"*{text}*" for text in shown], "*20*"])
    return table(["data", "noise", "method", *COLUMNS.values(), "seeds"], rows)


def named(noise: str, level: object) -> str:
    """Put a noise in words.

    >>> named("clean", 0.0), named("label", 0.3)
    ('clean', 'label 0.3')
    """
    return noise if noise == "clean" else f"{noise} {float(str(level)):g}"


def best(means: pd.Series) -> float:
    """Choose the best of some methods' means: the smallest RMSE, the largest of everything else."""
    return float(means.min() if means.name == "rmse" else means.max())


def summary(frame: pd.DataFrame) -> str:
    """Count the cells where each method is no worse than SGD-IE by the mean over seeds, and name the others."""
    keys = ["data", "noise", "level"]
    means = frame.groupby([*keys, "method"], sort=False)[list(COLUMNS)].mean().reset_index().set_index(keys)
    plain = means[means["method"] == "SGD-IE"]
    rows = []
    for method in METHODS[1:]:
        own = means[means["method"] == method]
        worse = own["rmse"] > plain["rmse"]
        places = [f"{SHOWN[data]} {named(noise, level)}" for data, noise, level in own.index[worse]]
        counts = [f"{int((own['rmse'] <= plain['rmse']).sum())} of {len(own)}"]
        counts += [f"{int((own[c] >= plain[c]).sum())} of {len(own)}" for c in ("kendall", "jaccard@10")]
        rows.append([method, *counts, ", ".join(places) or "nowhere"])
    head = ["method", "RMSE no worse", "tau no worse", "J@10 no worse", "RMSE worse than SGD-IE's on"]
    return "Cells in which a method is no worse than SGD-IE, by the means over seeds:\n\n" + table(head, rows)


def plots(name: str, frame: pd.DataFrame) -> list[Plot]:
    """Plot estimate against truth for every example of seed 0."""
    drawn = []
    first_seed = frame[frame["seed"] == 0]
    for data, part in first_seed.groupby("data", sort=False):
        panels = []
        for (noise, level), cell in part.groupby(["noise", "level"], sort=False):
            clouds = [
                Series(row["method"], row["truth"], row["estimate"], METHODS.index(row["method"]), points=True)
                for _, row in cell.iterrows()
            ]
            panels.append(Panel(named(str(noise), level), clouds, "true change of the loss", "estimate", diagonal=True))
        title = f"{SHOWN[str(data)]}, {name}: estimate against truth, 400 examples of seed 0"
        drawn.append(Plot(f"scatter-{data}", title, panels))
    return drawn


CONVEX = spec("convex", "logistic", "Convex: logistic regression, scores against exact leave-one-out")
NONCONVEX = spec("nonconvex", "mlp", "Non-convex: the 8-8 ReLU network, scores against exact leave-one-out")
