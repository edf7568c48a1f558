"""Removal: test error after removing what looks wrong, what does harm, or both, compared with as many at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor

from experiments.reproduce.label_runs import RUNS, SHOWN, mislabelled
from experiments.reproduce.markdown import table
from experiments.reproduce.problems import QUIET
from experiments.reproduce.spec import Row, Settings, Spec
from leaveout.builtin.data import Examples
from leaveout.estimators import ACC, SGDIE, score
from leaveout.evaluate.cleanse import NOTHING, RANDOM, cleanse
from leaveout.evaluate.labels import labels, robust
from leaveout.scores import Scores

AMOUNTS = (10, 30, 100, 300, 1000)
TESTED = 10_000
DATA = ("digits", "adult", "mnist")


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List every data set for every seed; at most half of the examples are removed."""
    small = {"n": 200, "val": 100, "epochs": 5} if quick else {}
    listed = [{"data": name, **RUNS[name], **small, "seed": seed} for seed in range(seeds) for name in DATA]
    return [{**one, "remove": [m for m in AMOUNTS if m <= one["n"] / 2], "random": 1} for one in listed]


def compute(settings: Settings) -> list[Row]:
    """Return a row per training: what was removed by which method, and the test error after it."""
    with mislabelled(settings) as problem:
        run, task = problem.run, problem.task
        scored = score([SGDIE(), ACC("free")], run, task, problem.val, resources=QUIET)
        confidence = torch.tensor(labels(run, task, resources=QUIET).table["label_score"].tolist(), dtype=torch.float64)
        both = robust(confidence.log()) + robust(scored[0].mean().double())
        values = {"labels()": confidence, **{one.method: one.mean().double() for one in scored}, "both": both}
        rankings = [ranking(scored[0], name, value) for name, value in values.items()]
        test = Examples(*(part[:TESTED] for part in (problem.test.x, problem.test.y, problem.test.ids)))
        options = {"random": settings["random"], "seed": settings["seed"]}
        curve = cleanse(rankings, run, task, test, settings["remove"], **options, resources=QUIET)
        wrong = problem.wrong
    caught = {
        (one.method, m): int(wrong[[int(i) for i in one.harmful(m)]].sum())
        for one in rankings
        for m in settings["remove"]
    }
    records = [{str(key): value for key, value in record.items()} for record in curve.table.to_dict("records")]
    return [
        {**row, "caught": caught.get((row["choice"], row["removed"])), "wrong": int(wrong.sum())} for row in records
    ]


def ranking(like: Scores, name: str, values: Tensor) -> Scores:
    """Return scores that remove examples in the order of the values, lowest first, as many as requested."""
    ranks = values.argsort(stable=True).argsort(stable=True).to(like.values) - len(values)
    return replace(like, values=ranks[:, None], method=name)


def tables(frame: pd.DataFrame) -> str:
    """Tabulate the change of the test error, paired with that of the same seed's run on everything."""
    parts = [SETTING]
    for name in [name for name in SHOWN if name in set(frame["data"])]:
        own = frame[frame["data"] == name]
        base = own[own["choice"] == NOTHING].groupby("seed")["error"].mean()
        amounts = sorted(own[own["removed"] > 0]["removed"].unique())
        choices = [choice for choice in own["choice"].unique() if choice not in (NOTHING, RANDOM)]
        rows = [
            [str(choice), *(_change(own[(own["choice"] == choice) & (own["removed"] == m)], base) for m in amounts)]
            for choice in [RANDOM, *choices]
        ]
        wrong = own["wrong"].mean()
        seeds = f"{len(base)} seed{'s' * (len(base) > 1)}"
        head = f"{SHOWN[name]}, {seeds}: test error {base.mean():.2%} with everything, {wrong:.0f} labels wrong."
        parts += [head, table(["removed by", *(str(m) for m in amounts)], rows)]
    return "\n\n".join(parts)


def _change(own: pd.DataFrame, base: pd.Series) -> str:
    """Write the change in points: mean over seeds, smallest to largest; and how many removed labels were wrong."""
    if not len(own):
        return "-"
    change = 100 * (own.groupby("seed")["error"].mean() - base).dropna()
    caught = own["caught"].mean()
    found = "" if pd.isna(caught) else f"; {caught:.0f} wrong"
    spread = f" ({change.min():+.2f} to {change.max():+.2f})" if len(change) > 1 else ""
    return f"{change.mean():+.2f}{spread}{found}"


SETTING = """Runs as in `labels`, a tenth of the training labels flipped. Removed are the first m of a ranking, whether
or not they count as issues or as harmful: `labels()`, influence on the validation loss (SGD-IE, ACC(free)), both (the
sum of the robust z-scores of log label score and SGD-IE), or m at random. The recorded run is trained again without
them, removed examples weighing zero in their batches. Change of the test error in points against the run with all,
paired by seed: mean (least to largest of the seeds); how many of the removed labels were wrong."""

REMOVAL = Spec(
    "removal",
    "Removal: test error without the labels that look wrong, without what does harm, without both",
    seeds=3,
    cells=cells,
    compute=compute,
    tables=tables,
    naming=("data", "n", "seed"),
)
