"""Data cleansing: remove what scores call harmful, retrain, and measure the test error."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pandas as pd
from torch import nn

from experiments.reproduce.markdown import table
from experiments.reproduce.plots import Panel, Plot, Series
from experiments.reproduce.problems import QUIET, trained
from experiments.reproduce.spec import Row, Settings, Spec
from leaveout.builtin import data, models
from leaveout.builtin.data import Examples
from leaveout.estimators import ACC, SGDIE, TracIn, score
from leaveout.evaluate.cleanse import NOTHING, RANDOM, cleanse

MODELS = {"mnist": "mnist-cnn", "cifar10": "cifar-cnn"}
SHOWN = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
# Sizes are multiples of the batch size: a short last batch takes a large noisy step, right before the run ends.
SHARED = {"batch": 64, "lr": 0.05, "l2": 0.0}
SMALL = {"n": 5120, "val": 2000, "test": 10_000, "epochs": 10, "remove": [10, 50, 100, 250, 500, 1000], "random": 3}
COLOUR = 10_048
FULL = {"val": 10_000, "test": 10_000, "epochs": 20, "random": 5}
AMOUNTS = [1, 3, 6, 10, 30, 60, 100, 300, 600, 1000, 3000, 6000, 10_000]


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List MNIST clean and with a tenth of the labels flipped for every seed, then CIFAR-10 for one."""
    small = {**SMALL, "n": 1920, "val": 500, "test": 2000, "epochs": 4, "remove": [10, 100], "random": 1}
    mnist = [
        {"data": "mnist", "flipped": flipped, **(small if quick else SMALL), **SHARED, "sketch": None, "seed": seed}
        for seed in range(seeds)
        for flipped in (0.0, 0.1)
    ]
    size = {"n": 512, "epochs": 1} if quick else {"n": COLOUR, "epochs": 5, "remove": [100, 500, 1000], "random": 1}
    cifar = {"data": "cifar10", "flipped": 0.1, **(small if quick else SMALL), **size, **SHARED, "sketch": 4096}
    return [*mnist, {**cifar, "seed": 0}]


def full(seeds: int, quick: bool) -> Sequence[Settings]:
    """List the published sizes: all images but 10,000 for validation, 20 epochs."""
    if quick:
        return cells(seeds, True)
    return [
        {
            "data": name,
            "flipped": flipped,
            "n": n,
            **FULL,
            "remove": AMOUNTS,
            **SHARED,
            "sketch": None if name == "mnist" else 4096,
            "seed": seed,
        }
        for seed in range(seeds)
        for name, n in (("mnist", 50_000), ("cifar10", 40_000))
        for flipped in (0.0, 0.1)
    ]


def compute(settings: Settings) -> list[Row]:
    """Return a row per training: what was removed by which method, and the test loss and error after it."""
    seed, name = settings["seed"], settings["data"]
    dataset = data.load(name, n_train=settings["n"], n_val=settings["val"], seed=seed)
    noisy = data.flip(dataset.train, settings["flipped"], seed)
    test = Examples(*(part[: settings["test"]] for part in (dataset.test.x, dataset.test.y, dataset.test.ids)))
    model = models.build(MODELS[name], seed=seed)
    with trained(model, nn.CrossEntropyLoss(), noisy.examples, dataset.val, settings) as problem:
        methods = [SGDIE(), ACC("free", sketch=settings["sketch"]), TracIn()]
        scored = score(methods, problem.run, problem.task, problem.val, resources=QUIET)
        curve = cleanse(
            *(scored, problem.run, problem.task, test, settings["remove"]),
            random=settings["random"],
            seed=seed,
            resources=QUIET,
        )
    caught = {
        (scores.method, m): int(noisy.touched[[int(i) for i in scores.harmful(m)]].sum())
        for scores in scored
        for m in {min(m, scores.harmful_count) for m in settings["remove"]}
    }
    return [
        {**row, "flipped_found": caught.get((row["choice"], row["removed"])), "flipped_all": int(noisy.touched.sum())}
        for row in ({str(key): value for key, value in record.items()} for record in curve.table.to_dict("records"))
    ]


def tables(setting: str, frame: pd.DataFrame) -> str:
    """Tabulate the test error by method and number removed, and its change: mean (std) over seeds."""
    rows = []
    for (name, flipped), part in frame.groupby(["data", "flipped"], sort=False):
        base = part[part["choice"] == NOTHING].groupby("seed")["error"].mean()
        place = [SHOWN[str(name)], f"{float(str(flipped)):.0%}"]
        rows.append([*place, "nothing", "0", f"{base.mean():.2%}", "-", "-", str(len(base))])
        for (choice, removed), own in part[part["choice"] != NOTHING].groupby(["choice", "removed"], sort=False):
            by = own.groupby("seed")["error"].mean()
            change = (by - base).dropna()
            phrase = (
                f"{100 * change.mean():+.2f} ({100 * change.std():.2f})"
                if len(change) > 1
                else f"{100 * change.mean():+.2f}"
            )
            caught = own["flipped_found"].mean()
            share = "-" if pd.isna(caught) or not flipped else f"{caught:.0f} of {own['flipped_all'].iloc[0]}"
            rows.append([*place, str(choice), str(removed), f"{by.mean():.2%}", phrase, share, str(len(by))])
    head = ["data", "flipped", "removed by", "removed", "test error", "change, points (std)", "flipped found", "seeds"]
    return f"{setting}\n\n" + table(head, rows)


def plots(frame: pd.DataFrame) -> list[Plot]:
    """Plot the test error against the number removed."""
    panels = []
    order = [RANDOM, "SGD-IE", "TracIn"]
    for (name, flipped), part in frame.groupby(["data", "flipped"], sort=False):
        base = part[part["choice"] == NOTHING]["error"].mean()
        lines = []
        for choice, own in part[part["choice"] != NOTHING].groupby("choice", sort=False):
            by = own.groupby(["removed", "seed"])["error"].mean().groupby("removed")
            mean, error = by.mean(), by.sem().fillna(0.0)
            colour = {RANDOM: 6, "SGD-IE": 0, "TracIn": 5}.get(str(choice), 2)
            lines.append(
                Series(str(choice), list(mean.index), list(mean), colour, list(mean - error), list(mean + error))
            )
        amounts = sorted(part[part["removed"] > 0]["removed"].unique())
        lines.append(Series("nothing removed", [amounts[0], amounts[-1]], [base, base], 7, dashed=True))
        lines.sort(key=lambda line: line.name in order)
        title = f"{SHOWN[str(name)]}, {float(str(flipped)):.0%} of labels flipped"
        panels.append(Panel(title, lines, "removed", "test error", log_x=True))
    return [Plot("cleansing", "Test error after removing examples, mean and standard error over seeds", panels)]


SETTING = """MNIST: 5,120 training images, 10 epochs; CIFAR-10: 10,048 training images, 5 epochs, a tenth of the labels
flipped; whole batches of 64. 2,000 validation images are scored for, the test error is over the 10,000 official test
images. Learning rate 0.05, the recorded batches with removed examples weighing zero. GroupNorm stands where the
original network has BatchNorm, which has no per-example gradients."""
SETTING_FULL = """All training images but 10,000 for validation, 20 epochs, batch 64, learning rate 0.05, as published,
but with GroupNorm in place of BatchNorm."""

CLEANSING = Spec(
    "cleansing",
    "Cleansing: test error after removing the most harmful examples",
    seeds=3,
    cells=cells,
    compute=compute,
    tables=partial(tables, SETTING),
    plots=plots,
    naming=("data", "flipped", "n", "seed"),
)
CLEANSING_FULL = Spec(
    "cleansing-full",
    "Cleansing at the published size (days on a small machine)",
    seeds=5,
    cells=full,
    compute=compute,
    tables=partial(tables, SETTING_FULL),
    plots=plots,
    naming=("data", "flipped", "n", "seed"),
)
