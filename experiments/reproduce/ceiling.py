"""Whether there is a truth to predict: exact replays from moved starts compared with each other and with SGD-IE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import torch

from experiments.reproduce.markdown import spread, table
from experiments.reproduce.networks import network
from experiments.reproduce.plots import Panel, Plot, Series
from experiments.reproduce.problems import QUIET
from experiments.reproduce.spec import Row, Settings, Spec
from leaveout.estimators import SGDIE, Replay
from leaveout.estimators.question import Question
from leaveout.estimators.replay import JITTER
from leaveout.evaluate.ceiling import group_sizes
from leaveout.evaluate.metrics import spearman

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
SCALED = {"scaled": True, "moves": 4}
CASES: tuple[dict[str, Any], ...] = (
    {"activation": "gelu", "jitter": 1e-3},
    {"activation": "relu", "jitter": 1e-3},
    {"activation": "relu", "jitter": 1e-5},
    {"activation": "relu", "jitter": 1e-7},
    {"activation": "gelu", "jitter": 3e-2, **SCALED},
    {"activation": "relu", "jitter": 1e-3, **SCALED},
    {"activation": "relu", "jitter": 3e-2, **SCALED},
)
SHOWN = {"gelu": "GELU", "relu": "ReLU"}
COLUMNS = {
    "between moves": "two moved starts, truth and truth",
    "recorded and mean": "recorded truth and the mean over moves",
    "SGD-IE and recorded": "SGD-IE and its own truth",
    "SGD-IE and mean": "SGD-IE and the mean over moves",
    "kinks and recorded": "SGD-IE(kinks) and its own truth",
    "kinks and mean": "SGD-IE(kinks) and the mean over moves",
}


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List a run for each seed, activation, scale of the inputs and size of the moves."""
    return [{**BASE, **case, **(QUICK if quick else {}), "seed": seed} for seed in range(seeds) for case in CASES]


def left_out(settings: Settings) -> list[int]:
    """Return the left-out examples, drawn by the seed."""
    order = torch.Generator().manual_seed(settings["seed"])
    return torch.randperm(settings["n"], generator=order)[: settings["replays"]].tolist()


def compute(settings: Settings) -> list[Row]:
    """Compute Spearman between truths, and between SGD-IE and truths; at the default jitter also for groups."""
    ids, jitter = left_out(settings), settings["jitter"]
    with network(settings) as problem:
        asked = (problem.run, problem.task, problem.val)
        recorded = Replay().score(*asked, ids=ids, resources=QUIET).mean().numpy()
        moved = [
            Replay(move=move, jitter=jitter).score(*asked, ids=ids, resources=QUIET).mean().numpy()
            for move in range(settings["moves"])
        ]
        scores, bent = (SGDIE(kinks=k).score(*asked, ids=ids, resources=QUIET).mean().numpy() for k in (False, True))
        question = Question(*asked, resources=QUIET)
        groups = group_sizes(question, settings["seed"], jitter)[0] if jitter == JITTER else {}
    mean = np.mean(moved, axis=0)
    return [
        {
            "between moves": float(np.mean([spearman(one, other) for one, other in combinations(moved, 2)])),
            "recorded and mean": spearman(recorded, mean),
            "SGD-IE and recorded": spearman(scores, recorded),
            "SGD-IE and mean": spearman(scores, mean),
            "kinks and recorded": spearman(bent, recorded),
            "kinks and mean": spearman(bent, mean),
            "groups": ", ".join(f"{size}: {tau:.2f}" for size, tau in groups.items()),
        }
    ]


def _kinds(frame: pd.DataFrame) -> Iterator[tuple[str, float, pd.DataFrame]]:
    """Yield each kind of run in words, and the size of its moves, with its rows."""
    known = frame.assign(scaled=frame["scaled"].notna() if "scaled" in frame else False)
    for (scaled, activation, jitter), own in known.groupby(["scaled", "activation", "jitter"], sort=False):
        pixels = "standardised" if scaled else "0 to 1"
        yield f"{SHOWN[str(activation)]}, pixels {pixels}", float(str(jitter)), own


def tables(frame: pd.DataFrame) -> str:
    """Tabulate a row for each kind of run and size of the moves; what was not measured is left out."""
    rows = []
    for name, jitter, own in _kinds(frame):
        figures = [spread(own[key]) if key in own and own[key].notna().any() else "-" for key in COLUMNS]
        words = "; ".join(str(text) for text in own["groups"] if text)
        rows.append([f"{name}, moved by {jitter:.0e}", *figures, words or "-", str(own["seed"].nunique())])
    head = ["", *COLUMNS.values(), "tau of groups between two starts, by size and seed", "seeds"]
    return f"{SETTING}\n\n" + table(head, rows)


def plots(frame: pd.DataFrame) -> list[Plot]:
    """Plot how reproducible the truth is by the size of the move."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, jitter, own in _kinds(frame):
        lines.setdefault(name, []).append((jitter, float(own["between moves"].mean())))
    series = [
        Series(name, [x for x, _ in sorted(points)], [y for _, y in sorted(points)], colour)
        for colour, (name, points) in enumerate(lines.items())
    ]
    panel = Panel("truth and truth", series, "size of the move", "Spearman, two moved starts", log_x=True)
    return [Plot("ceiling", "Does the effect of one image repeat itself?", [panel])]


SETTING = """MNIST, 784-16-16-10, 6,000 images, one epoch, batch 64, plain SGD at 0.1, float64; 60 images left out one
at a time from the recorded start and from moved ones, each replay compared with the one with every image from the same
start. Pixels are from 0 to 1 (12 moves), or standardised: minus their mean, over their standard deviation (4 moves). A
move has a random direction, and its size is relative to the length of the start: 3e-2 is 1e-3 in every single
parameter. Spearman of the changes of the mean loss of 500 queries; "-" was not measured. Groups are 24 random ones of
each size, until a size is reproducible (tau 0.5). Mean (standard deviation) over seeds."""

CEILING = Spec(
    "ceiling",
    "The ceiling: does the effect of one example repeat itself?",
    seeds=3,
    cells=cells,
    compute=compute,
    tables=tables,
    plots=plots,
    naming=("activation", "jitter", "seed"),
)
