"""Wrong labels: how many of those that were flipped on purpose are found, and by which signal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from leaveout.builtin import data, models
from leaveout.estimators import ACC, SGDIE, TracIn, score
from leaveout.evaluate.dynamics import dynamics
from leaveout.evaluate.labels import Labels, influence_weight, labels
from leaveout.evaluate.verify import verify
from leaveout.paper.reproduce.markdown import spread, table
from leaveout.paper.reproduce.problems import QUIET, Problem, trained
from leaveout.paper.reproduce.spec import Row, Settings, Spec

SHOWN = {"digits": "digits", "20news": "20News", "adult": "Adult", "mnist": "MNIST"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("mlp", {"hidden": (16,), "outputs": 10, "activation": "tanh"}),
    "20news": ("logistic", {}),
    "adult": ("logistic", {}),
    "mnist": ("mnist-cnn", {}),
}
RUNS = {
    "digits": {"n": 1000, "val": 400, "epochs": 20, "batch": 50, "lr": 0.2, "replays": 32},
    "20news": {"n": 1000, "val": 400, "epochs": 30, "batch": 50, "lr": 0.1, "replays": 32},
    "adult": {"n": 2000, "val": 1000, "epochs": 20, "batch": 50, "lr": 0.1, "replays": 32},
    "mnist": {"n": 4992, "val": 2000, "epochs": 6, "batch": 64, "lr": 0.05, "replays": 0},
}
FOLDS = 5
OURS = "labels()"


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List Digits, Adult and 20News for every seed, then MNIST for one."""
    shared = {"flipped": 0.1, "l2": 0.0}
    small = {"n": 200, "val": 100, "epochs": 5, "replays": 8} if quick else {}
    names = [(name, seed) for seed in range(seeds) for name in ("digits", "adult", "20news")]
    return [{"data": name, **RUNS[name], **small, **shared, "seed": seed} for name, seed in [*names, ("mnist", 0)]]


@contextmanager
def flipped_run(settings: Settings) -> Iterator[tuple[Problem, Tensor]]:
    """Record a run on flipped labels with clean queries, and which labels were flipped."""
    name, seed = settings["data"], settings["seed"]
    dataset = data.load(name, n_train=settings["n"], n_val=settings["val"], seed=seed)
    noisy = data.flip(dataset.train, settings["flipped"], seed + 1)
    kind, options = MODELS[name]
    if kind != "mnist-cnn":
        options = {**options, "features": noisy.examples.x.shape[1]}
    loss = nn.BCEWithLogitsLoss() if len(dataset.classes) == 2 else nn.CrossEntropyLoss()
    with trained(models.build(kind, seed=seed, **options), loss, noisy.examples, dataset.val, settings) as problem:
        yield problem, noisy.touched


def compute(settings: Settings) -> list[Row]:
    """Return a row for each way to rank the labels, lowest first."""
    with flipped_run(settings) as (problem, wrong):
        run, task = problem.run, problem.task
        rows: list[Row] = []

        def measured(method: str, ask: Callable[..., Any], *arguments: Any) -> Any:
            start = time.perf_counter()
            answer = ask(*arguments)
            row = {"method": method, "seconds": round(time.perf_counter() - start, 2)}
            values = answer.table["label_score"].to_numpy() if isinstance(answer, Labels) else np.asarray(answer)
            rows.append({**row, **ranked(values, wrong.numpy()), **counted(answer, wrong.numpy())})
            return answer

        plain = measured(OURS, lambda: labels(run, task, resources=QUIET))
        measured(f"labels(folds={FOLDS})", lambda: labels(run, task, folds=FOLDS, resources=QUIET))
        history = dynamics(run, task, resources=QUIET)
        measured("averaged margin", lambda: history.margin)
        measured("mean loss", lambda: -history.loss)
        measured("mean probability", lambda: history.probability)
        measured("last loss", lambda: -history.losses[-1])
        measured("self-influence (TracIn)", lambda: -TracIn("epochs").self_influence(run, task, resources=QUIET).mean())
        for scores in score([SGDIE(), ACC("free")], run, task, problem.val, resources=QUIET):
            measured(scores.method, scores.mean)
            if not settings["replays"]:
                continue
            check = verify(scores, run, task, problem.val, replays=settings["replays"], resources=QUIET)
            weight = influence_weight(check, history.misfit)
            mixed = labels(run, task, scores=scores, check=check, resources=QUIET) if weight else plain
            measured(f"labels(scores={scores.method})", lambda answer: answer, mixed)
            rows[-1] |= {"weight": weight, "verdict": check.verdict.level}
        if find_spec("cleanlab"):
            measured(f"cleanlab ({FOLDS}-fold)", lambda: cleanlab_scores(problem))
    return rows


def cleanlab_scores(problem: Problem) -> Tensor:
    """Give cleanlab's label quality, as it is by default, from out-of-sample probabilities of the same training."""
    last = dynamics(problem.run, problem.task, states=1, folds=FOLDS, resources=QUIET)
    rank = import_module("cleanlab.rank")
    return torch.from_numpy(rank.get_label_quality_scores(last.labels.numpy(), last.opinions.double().numpy()))


def ranked(values: np.ndarray, wrong: np.ndarray) -> Row:
    """Measure a ranking, lowest first: average precision, and the share of the k wrong labels among the first k.

    >>> ranked(np.array([0.1, 0.3, 0.2, 0.9]), np.array([True, True, False, False]))
    {'precision': 0.8333333333333333, 'found': 0.5}
    """
    first = np.argsort(values, kind="stable")[: int(wrong.sum())]
    return {"precision": float(average_precision_score(wrong, -values)), "found": float(wrong[first].mean())}


def counted(answer: Any, wrong: np.ndarray) -> Row:
    """Compare the labels that count as issues with those that are wrong."""
    if not isinstance(answer, Labels):
        return {}
    issue = answer.table["is_label_issue"].to_numpy()
    hits = int((issue & wrong).sum())
    return {"issues": int(issue.sum()), "hits": hits, "wrong": int(wrong.sum())}


def tables(frame: pd.DataFrame) -> str:
    """Tabulate average precision and share found by data set and method, then what counts as an issue."""
    names = [name for name in SHOWN if name in set(frame["data"])]
    shares, issues = [], []
    for method, own in frame.groupby("method", sort=False):
        parts = [own[own["data"] == name] for name in names]
        shares.append([str(method), *(_share(p) for p in parts)])
        if own["issues"].notna().all():
            issues.append([str(method), *(_issues(p) for p in parts)])
    seeds = ", ".join(f"{SHOWN[name]} {frame[frame['data'] == name]['seed'].nunique()}" for name in names)
    head = ["", *(SHOWN[name] for name in names)]
    weights = frame[frame["weight"].notna()] if "weight" in frame else frame[:0]
    used = [
        [SHOWN[str(name)], str(method), spread(own["weight"]), ", ".join(own["verdict"])]
        for (name, method), own in weights.groupby(["data", "method"], sort=False)
    ]
    return "\n\n".join(
        [
            SETTING,
            f"Average precision: mean (standard deviation) over seeds; share found among the first k. Seeds: {seeds}.",
            table(["ranked by", *head[1:]], shares),
            "What counts as an issue without a threshold: issues / of them flipped / flipped in all, mean over seeds.",
            table(["", *head[1:]], issues),
            "How much influence counted, and the verdict of each seed's check.",
            table(["data", "method", "weight", "verdicts"], used),
        ]
    )


def _share(part: pd.DataFrame) -> str:
    return f"{spread(part['precision'])}; {part['found'].mean():.0%}" if len(part) else "-"


def _issues(part: pd.DataFrame) -> str:
    return " / ".join(f"{part[name].mean():.0f}" for name in ("issues", "hits", "wrong")) if len(part) else "-"


SETTING = """A tenth of the training labels flipped to another class at random; every signal is read from the same run.
Digits 1,000 examples, 64-16-10 tanh, 20 epochs at 0.2; Adult 2,000 and 20News 1,000, logistic regression, 20 and 30
epochs at 0.1; batches of 50. MNIST 4,992 images, two convolutions, 6 epochs at 0.05, batches of 64. Influence is on
400 (Adult 1,000, MNIST 2,000) clean queries, verified by 32 replays (not on MNIST)."""

LABELS = Spec(
    "labels",
    "Wrong labels: those that were flipped, found by training dynamics, by influence, out of sample",
    seeds=3,
    cells=cells,
    compute=compute,
    tables=tables,
    naming=("data", "n", "seed"),
)
