"""Wrong labels: how many of the deliberately flipped ones are found, and by which signal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor

from experiments.reproduce.label_runs import RUNS, SHOWN, Mislabelled, mislabelled
from experiments.reproduce.markdown import spread, table
from experiments.reproduce.problems import QUIET
from experiments.reproduce.spec import Row, Settings, Spec
from leaveout.estimators import ACC, SGDIE, Estimator, TracIn, score
from leaveout.evaluate.dynamics import MEMORISED, Dynamics, dynamics
from leaveout.evaluate.label_issues import FOLDS
from leaveout.evaluate.labels import judged, labels
from leaveout.evaluate.verify import verify

REPLAYS = {"digits": 32, "20news": 32, "adult": 32}
"""The number of replays that influence is verified with. The other runs predict less than 95% of their labels, so that
influence has no weight there whatever a check would say, and no check is made."""
OURS = "labels()"


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List every data set for every seed, first for the training dynamics, then for influence."""
    small = {"n": 200, "val": 100, "epochs": 5, "replays": 8} if quick else {}
    return [
        {"data": name, "signals": signals, **RUNS[name], "replays": REPLAYS.get(name, 0), **small, "seed": seed}
        for signals in ("dynamics", "influence")
        for seed in range(seeds)
        for name in RUNS
    ]


class Measured:
    """The rows of a cell: how well each ranking of the labels, lowest first, finds the wrong ones."""

    def __init__(self, wrong: np.ndarray) -> None:
        self.wrong, self.rows = wrong, list[Row]()

    def add(self, method: str, ask: Callable[[], Any], **more: Any) -> None:
        """Add a ranking, given as values or as a table of labels, with the processor time that it took."""
        start = time.process_time()
        answer = ask()
        seconds = round(time.process_time() - start, 2)
        table = isinstance(answer, pd.DataFrame)
        values = answer["label_score"].to_numpy() if table else np.asarray(answer)
        found = {**ranked(values, self.wrong), **(counted(answer, self.wrong) if table else {})}
        self.rows.append({"method": method, "seconds": seconds, **found, **more})


def compute(settings: Settings) -> list[Row]:
    """Return a row for each way to rank the labels."""
    with mislabelled(settings) as problem:
        measured = Measured(problem.wrong.numpy())
        if settings["signals"] == "dynamics":
            _dynamics(problem, measured)
        else:
            _influence(problem, measured, settings)
    return measured.rows


def _dynamics(problem: Mislabelled, measured: Measured) -> None:
    """Measure what the recorded states say, and what trainings that did not see the example say."""
    run, task = problem.run, problem.task
    history = dynamics(run, task, resources=QUIET)
    again = dynamics(run, task, folds=FOLDS, resources=QUIET)
    memorised = history.misfit < MEMORISED
    seen, unseen = (judged(run, task, one, resources=QUIET) for one in (history, again))
    measured.add(OURS, lambda: unseen if memorised else seen, misfit=history.misfit)  # as folds="auto" chooses
    measured.add("labels(folds=None)", lambda: seen)
    measured.add(f"labels(folds={FOLDS})", lambda: unseen)
    measured.add("averaged margin (AUM)", lambda: history.margin)
    measured.add("mean loss", lambda: -history.loss)
    measured.add("mean probability", lambda: history.probability)
    measured.add("last loss", lambda: -history.losses[-1])
    if find_spec("cleanlab"):
        measured.add(f"cleanlab ({FOLDS}-fold)", lambda: cleanlab_scores(again))


def _influence(problem: Mislabelled, measured: Measured, settings: Settings) -> None:
    """Measure influence on queries with correct labels, alone and as ``labels`` includes it."""
    run, task = problem.run, problem.task
    own = TracIn("epochs")
    measured.add("self-influence (TracIn)", lambda: -own.self_influence(run, task, resources=QUIET).mean())
    coupled = settings["data"] == "cifar10n"  # by BatchNorm: ACC would need a batch gradient per example
    methods: list[Estimator] = [SGDIE()] if coupled else [SGDIE(), ACC("free")]
    for scores in score(methods, run, task, problem.val, resources=QUIET):
        measured.add(scores.method, scores.mean)
        check = None
        if settings["replays"]:
            check = verify(
                scores, run, task, problem.val, replays=settings["replays"], budget=math.inf, resources=QUIET
            )
        mixed = labels(run, task, scores=scores, check=check, resources=QUIET)
        words = {"weight": mixed.weight, "verdict": check.verdict.level if check else None}
        measured.add(f"labels(scores={scores.method})", partial(getattr, mixed, "table"), **words)


def cleanlab_scores(again: Dynamics) -> Tensor:
    """Return cleanlab's default label quality, from the last state's out-of-sample probabilities."""
    rank = import_module("cleanlab.rank")
    return torch.from_numpy(rank.get_label_quality_scores(again.labels.numpy(), again.final.double().numpy()))


def ranked(values: np.ndarray, wrong: np.ndarray) -> Row:
    """Measure a ranking, lowest first: average precision, and the share of the k wrong labels among the first k.

    >>> ranked(np.array([0.1, 0.3, 0.2, 0.9]), np.array([True, True, False, False]))
    {'precision': 0.8333333333333333, 'found': 0.5}
    """
    first = np.argsort(values, kind="stable")[: int(wrong.sum())]
    return {"precision": float(average_precision_score(wrong, -values)), "found": float(wrong[first].mean())}


def counted(answer: pd.DataFrame, wrong: np.ndarray) -> Row:
    """Compare the labels that count as issues with the wrong ones."""
    issue = answer["is_label_issue"].to_numpy()
    hits = int((issue & wrong).sum())
    return {"issues": int(issue.sum()), "hits": hits, "wrong": int(wrong.sum())}


def tables(frame: pd.DataFrame) -> str:
    """Tabulate average precision and share found by data set and method, then what counts as an issue."""
    names = [name for name in SHOWN if name in set(frame["data"])]
    shares, issues = [], []
    for method, own in frame.groupby("method", sort=False):
        parts = [own[own["data"] == name] for name in names]
        means = [part["precision"].mean() for part in parts]
        mean = "-" if any(map(np.isnan, means)) else f"{np.mean(means):.3f}"
        shares.append([str(method), *(_share(p) for p in parts), mean])
        if own["issues"].notna().all():
            issues.append([str(method), *(_issues(p) for p in parts)])
    head = [SHOWN[name] for name in names]
    ours = frame[frame["method"] == OURS]
    shares_fitted = [1 - ours[ours["data"] == name]["misfit"] for name in names]
    fitted = [", ".join(f"{share:.1%}" for share in part) for part in shares_fitted]
    return "\n\n".join(
        [
            SETTING,
            "Average precision: mean (standard deviation) over seeds; share found among the first k; number of seeds "
            "if not three. Last column: the mean over the data sets.",
            table(["ranked by", *head, "mean"], shares),
            "What counts as an issue without a threshold: issues / of them wrong / wrong in all, mean over seeds.",
            table(["", *head], issues),
            f"Share of the given labels that the trained model predicts; above {1 - MEMORISED:.0%} `labels()` judges "
            "out of sample.",
            table(["", *head], [["predicted", *fitted]]),
        ]
    )


def _share(part: pd.DataFrame) -> str:
    if not len(part):
        return "-"
    seeds = part["seed"].nunique()
    few = "" if seeds == 3 else f"; {seeds} seed" + "s" * (seeds > 1)
    return f"{spread(part['precision'])}; {part['found'].mean():.0%}{few}"


def _issues(part: pd.DataFrame) -> str:
    return " / ".join(f"{part[name].mean():.0f}" for name in ("issues", "hits", "wrong")) if len(part) else "-"


SETTING = """A tenth of the training labels flipped to another class at random; in CIFAR-10N the labels that people gave
(`aggregate`). Every signal is read from the same run. Digits 1,000 examples, 64-16-10 tanh, 20 epochs at 0.2; Adult
2,000 and 20News 1,000, logistic regression, 20 and 30 epochs at 0.1; batches of 50. MNIST 4,992 images, two
convolutions, 6 epochs at 0.05, batches of 64. CIFAR-10N 10,000 images, four convolutions (24, 48, 64, 64 channels) with
BatchNorm, random crops and flips, momentum, 6 epochs on a cosine from 0.1, batches of 100. Influence is on 400 (Adult
1,000, MNIST and CIFAR 2,000) queries with right labels. Self-influence is read at the ends of epochs, for CIFAR-10N of
the images as they are and with BatchNorm's running statistics; ACC, which would take a batch's gradient for each
example and step there, was not computed on it. On MNIST and CIFAR-10N `labels(scores=...)` was given no check: the runs
predict less than 95% of their labels, so that influence has no weight whatever a check says."""

LABELS = Spec(
    "labels",
    "Wrong labels: flipped ones and those that people gave, found by training dynamics, by influence, out of sample",
    seeds=3,
    cells=cells,
    compute=compute,
    tables=tables,
    naming=("data", "signals", "n", "seed"),
)
