"""The linear datamodeling score in both senses: subsets of one trajectory, and fresh trainings on halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import TensorDataset

from experiments.reproduce.jumps import DERIVATIVE, JUMP, PLAIN, clouds, compared, readings
from experiments.reproduce.markdown import spread, table
from experiments.reproduce.networks import network
from experiments.reproduce.plots import Plot
from experiments.reproduce.problems import QUIET
from experiments.reproduce.spec import Row, Settings, Spec
from experiments.reproduce.tsloo import GPT
from experiments.reproduce.words import small_gpt
from leaveout.builtin import models
from leaveout.estimators import SGDIE, Replay, TracIn, score
from leaveout.evaluate.average import average
from leaveout.evaluate.metrics import algorithm_lds, random_subsets
from leaveout.scores import Scores
from leaveout.trajectory.left_out import leave_out

SHARES = (0.01, 0.05, 0.2)
RUN: dict[str, Any] = {**GPT, "lr": 1e-3, "meaning": "run", "subsets": 100}
DIGITS: dict[str, Any] = {
    "data": "digits",
    "n": 300,
    "queries": 50,
    "hidden": [32],
    "activation": "gelu",
    "dtype": "float32",
    "batch": 30,
}
SMALL_RUN: dict[str, Any] = {
    **DIGITS,
    "optimizer": "adamw",
    "lr": 0.003,
    "epochs": 5,
    "meaning": "run",
    "subsets": 100,
}
ALGORITHM: dict[str, Any] = {
    **DIGITS,
    "optimizer": "sgd",
    "lr": 0.1,
    "epochs": 10,
    "meaning": "algorithm",
    "subsets": 40,
    "repeats": 5,
    "runs": 5,
}
QUICK: dict[str, Any] = {"n": 60, "queries": 4, "subsets": 6, "epochs": 1}


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List for each seed the single-run scores of a digits network and the GPT, and the algorithm's of the network."""
    small = QUICK if quick else {}
    return [{**case, **small, "seed": seed} for seed in range(seeds) for case in (SMALL_RUN, RUN, ALGORITHM)]


def compute(settings: Settings) -> list[Row]:
    """Compute a row per method, and per share or number of averaged runs."""
    return _of_the_run(settings) if settings["meaning"] == "run" else _of_the_algorithm(settings)


def _of_the_run(settings: Settings) -> list[Row]:
    n, rows = settings["n"], []
    subsets = {share: random_subsets(n, settings["subsets"], share, settings["seed"]) for share in SHARES}
    left_out = {f"{share:.0%} left out": leave_out(n, groups=groups) for share, groups in subsets.items()}
    with (network if settings["data"] == "digits" else small_gpt)(settings) as problem:
        asked = (problem.run, problem.task, problem.val)
        estimates = readings(problem, {"single": leave_out(n), **left_out})
        single = estimates["single"]
        for share, groups in subsets.items():
            of = f"{share:.0%} left out"
            truth = Replay().score(*asked, queries="each", groups=groups, resources=QUIET).values.double().numpy()
            members = list(groups.values())
            predicted = {
                PLAIN: estimates[of][PLAIN],
                f"sum of {JUMP}": np.stack([single[JUMP][ids].sum(0) for ids in members]),
                f"{JUMP} of the group": estimates[of][JUMP],
                f"sum of {DERIVATIVE}": np.stack([single[DERIVATIVE][ids].sum(0) for ids in members]),
                f"{DERIVATIVE} of the group": estimates[of][DERIVATIVE],
            }
            for method, values in predicted.items():
                row = compared(method, values, truth, points=settings["seed"] == 0)
                rows.append({**row, "lds": row["per_query"], "of": of})
    return rows


def _of_the_algorithm(settings: Settings) -> list[Row]:
    seed = settings["seed"]
    by_method: dict[str, list[Scores]] = {}
    for run in range(settings["runs"]):
        with network({**settings, "data_seed": seed, "seed": 1000 * seed + run}) as problem:
            asked = (problem.run, problem.task, problem.val)
            for scores in score([SGDIE(), TracIn()], *asked, queries="each", resources=QUIET):
                by_method.setdefault(scores.method, []).append(scores)
            train_set, val = problem.task.train_set, problem.val
    kept = list(random_subsets(settings["n"], settings["subsets"], 0.5, seed).values())
    losses = np.stack(
        [
            [_fresh(settings, train_set, val, ids, 500_000 + 1000 * seed + repeat) for ids in kept]
            for repeat in range(settings["repeats"])
        ]
    )
    rows: list[Row] = []
    for method, runs in by_method.items():
        single = [algorithm_lds(scores, kept, losses) for scores in runs]
        mean = algorithm_lds(average(runs), kept, losses)
        rows.append({"method": method, "of": "one run", "lds": float(np.mean([one.value for one in single]))})
        rows.append({"method": method, "of": f"mean of {len(runs)} runs", "lds": mean.value})
        for row in rows[-2:]:
            row["ceiling"] = mean.ceiling
    return rows


def _fresh(settings: Settings, train_set: Any, val: Any, ids: list[int], seed: int) -> np.ndarray:
    """Return the query losses of a model trained on some examples, with its own initial weights and order."""
    (x, y), loss = train_set.tensors, nn.CrossEntropyLoss()
    model = models.build(
        "mlp",
        seed=seed,
        features=x.shape[1],
        hidden=tuple(settings["hidden"]),
        outputs=int(y.max()) + 1,
        activation=settings["activation"],
    ).to(x.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"])
    order, chosen = torch.Generator().manual_seed(seed), torch.tensor(ids)
    for _ in range(settings["epochs"]):
        for batch in chosen[torch.randperm(len(chosen), generator=order)].split(settings["batch"]):
            optimizer.zero_grad()
            loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        query: TensorDataset = val
        return nn.functional.cross_entropy(model(query.tensors[0]), query.tensors[1], reduction="none").numpy()


def tables(frame: pd.DataFrame) -> str:
    """Write a table for each meaning and data set."""
    parts = [SETTING]
    for key, part in frame.groupby(["meaning", "data"], sort=False):
        meaning, data = map(str, key)
        rows = []
        last = "off" if meaning == "run" else "ceiling"
        for (of, method), own in part.groupby(["of", "method"], sort=False):
            rows.append([str(of), str(method), spread(own["lds"]), spread(own[last]), str(own["seed"].nunique())])
        head = "RMSE over sd of the mean loss" if meaning == "run" else "ceiling"
        parts.append(table([HEADS[meaning, data], "method", "LDS, mean Spearman per query", head, "seeds"], rows))
    return "\n\n".join(parts)


def plots(frame: pd.DataFrame) -> list[Plot]:
    """Plot estimate against truth of the mean loss for every subset of seed 0, a picture per run."""
    runs = frame[frame["meaning"] == "run"]
    names = {"digits": "digits", "20news words": "gpt"}
    return [
        plot
        for data, own in runs.groupby("data", sort=False)
        for plot in clouds(own, "of", f"lds-{names[str(data)]}", f"Subsets, {HEADS['run', str(data)]}")
    ]


HEADS = {
    ("run", "digits"): "digits, single run",
    ("run", "20news words"): "small GPT, single run",
    ("algorithm", "digits"): "digits, algorithm",
}

SETTING = """Single run: the small GPT of `python -m experiments reproduce tsloo` (AdamW 0.001, one epoch), 100 random
subsets of 1%, 5% and 20% left out of the recorded trajectory, 10 queries; and 300 digits, 64-32-10 with GELU, AdamW at
0.003, 5 epochs of 30, 100 subsets, 50 queries. SGD-IE (the metagradient, MAGIC) is additive. Jumps of single examples
are added, or a subset's examples leave each batch in one jump; each with saturated moments and with moments by
derivative. Algorithm: the same digits and network with SGD at 0.1, 10 epochs; 40 random halves, each trained afresh
with 5 seeds, 50 queries; scores of one recorded run of all examples, and averaged over 5 runs of other seeds. The
ceiling is what a perfect prediction of the expected loss would reach (Spearman-Brown). Mean (standard deviation) over
seeds."""

LDS = Spec(
    "lds",
    "LDS: subsets, of one run and of the algorithm",
    seeds=3,
    cells=cells,
    compute=compute,
    tables=tables,
    naming=("meaning", "data", "seed"),
    plots=plots,
)
