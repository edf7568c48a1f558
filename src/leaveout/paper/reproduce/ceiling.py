"""When there is a truth to be true to: exact replays from moved starts compared with each other and with SGD-IE."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import torch

from leaveout.estimators import SGDIE, Replay
from leaveout.evaluate.ceiling import group_sizes
from leaveout.evaluate.metrics import spearman
from leaveout.paper.reproduce.markdown import spread, table
from leaveout.paper.reproduce.networks import network
from leaveout.paper.reproduce.problems import QUIET
from leaveout.paper.reproduce.spec import Row, Settings, Spec

BASE: dict[str, Any] = {
    "data": "mnist",
    "n": 6000,
    "queries": 500,
    "hidden": [16, 16],
    "dtype": "float64",
    "epochs": 1,
    "batch": 64,
    "optimizer": "sgd",
    "lr": 0.1,
    "replays": 60,
    "moves": 12,
}
QUICK: dict[str, Any] = {"data": "digits", "n": 200, "queries": 50, "replays": 16, "moves": 2}
CASES = (("gelu", 1e-3), ("relu", 1e-3), ("relu", 1e-5), ("relu", 1e-7))
SHOWN = {"gelu": "GELU", "relu": "ReLU"}


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """A run for each seed, activation and size of the moves."""
    return [
        {**BASE, **(QUICK if quick else {}), "activation": activation, "jitter": jitter, "seed": seed}
        for seed in range(seeds)
        for activation, jitter in CASES
    ]


def left_out(settings: Settings) -> list[int]:
    """The examples that are left out, drawn by the seed."""
    order = torch.Generator().manual_seed(settings["seed"])
    return torch.randperm(settings["n"], generator=order)[: settings["replays"]].tolist()


def compute(settings: Settings) -> list[Row]:
    """Spearman between truths, and between SGD-IE and truths; at the usual jitter also what groups do."""
    ids, jitter = left_out(settings), settings["jitter"]
    with network(settings) as problem:
        asked = (problem.run, problem.task, problem.val)
        recorded = Replay().score(*asked, ids=ids, resources=QUIET).mean().numpy()
        moved = [
            Replay(move=move, jitter=jitter).score(*asked, ids=ids, resources=QUIET).mean().numpy()
            for move in range(settings["moves"])
        ]
        scores = SGDIE().score(*asked, ids=ids, resources=QUIET).mean().numpy()
        groups = group_sizes(settings["seed"], jitter, *asked, QUIET)[0] if jitter == CASES[0][1] else {}
    mean = np.mean(moved, axis=0)
    return [
        {
            "between moves": float(np.mean([spearman(one, other) for one, other in combinations(moved, 2)])),
            "recorded and mean": spearman(recorded, mean),
            "SGD-IE and recorded": spearman(scores, recorded),
            "SGD-IE and mean": spearman(scores, mean),
            "groups": ", ".join(f"{size}: {tau:.2f}" for size, tau in groups.items()),
        }
    ]


def tables(frame: pd.DataFrame) -> str:
    """A row for each activation and size of the moves."""
    columns = ("between moves", "recorded and mean", "SGD-IE and recorded", "SGD-IE and mean")
    rows = []
    for (activation, jitter), own in frame.groupby(["activation", "jitter"], sort=False):
        shown = [spread(own[column]) for column in columns]
        words = "; ".join(str(text) for text in own["groups"] if text)
        named = f"{SHOWN[str(activation)]}, moved by {float(str(jitter)):.0e}"
        rows.append([named, *shown, words or "-", str(own["seed"].nunique())])
    head = [
        "",
        "two moved starts, truth and truth",
        "recorded truth and the mean over moves",
        "SGD-IE and its own truth",
        "SGD-IE and the mean over moves",
        "tau of groups between two starts, by size and seed",
        "seeds",
    ]
    return f"{SETTING}\n\n" + table(head, rows)


SETTING = """MNIST, pixels from 0 to 1, 784-16-16-10, 6,000 images, one epoch, batch 64, plain SGD at 0.1, float64; 60
images left out one at a time from the recorded start and from 12 moved ones, each replay compared with the one with
every image from the same start. Spearman of the changes of the mean loss of 500 queries. Groups are 24 random ones of
each size, until a size is reproducible (tau 0.5). Mean (standard deviation) over seeds."""

CEILING = Spec(
    "ceiling",
    "The ceiling: does the effect of one example repeat itself?",
    seeds=3,
    cells=cells,
    compute=compute,
    tables=tables,
    naming=("activation", "jitter", "seed"),
)
