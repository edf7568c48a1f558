"""The method chosen by measurement, on the built-in data sets with the default options of the commands."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd

from experiments.reproduce.markdown import spread, table
from experiments.reproduce.problems import QUIET
from experiments.reproduce.spec import Row, Settings, Spec
from leaveout.builtin.config import Config, DataPart, ModelPart, TrainPart, run_config
from leaveout.estimators import Replay, score
from leaveout.evaluate import choose as module
from leaveout.evaluate.choose import methods_for
from leaveout.evaluate.metrics import kendall

SHOWN = {"digits": "digits", "adult": "Adult", "20news": "20News", "mnist-1v7": "MNIST 1 and 7"}
BUDGETS: dict[str, dict[str, Any]] = {"a minute": {}, "none": {"PROBE": 0.0, "MOST": 128}}
"""What is changed in ``choose``: nothing, so that these runs are replayed completely, or estimates come at once."""


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List a run of ``leaveout train --data NAME`` for each data set and seed."""
    return [
        {"data": name, "n": 100 if quick else None, "epochs": 3 if quick else TrainPart().epochs, "seed": seed}
        for seed in range(seeds)
        for name in SHOWN
    ]


def compute(settings: Settings) -> list[Row]:
    """Compute for each budget the chosen method, its tau over all examples, and that of every method in the list."""
    seed = settings["seed"]
    given = Config(
        DataPart(settings["data"], settings["n"], seed=seed),
        ModelPart(seed=seed),
        train=TrainPart(epochs=settings["epochs"], seed=seed),
    )
    with tempfile.TemporaryDirectory(prefix="leaveout-reproduce-") as folder:
        run, subject = run_config(given, Path(folder) / "run", QUIET)
        asked = (run, subject.task, subject.query)
        truth = Replay().score(*asked, resources=QUIET).mean()
        methods = methods_for(run, subject.task)
        taus = {one.method: kendall(one.mean(), truth) for one in score(list(methods), *asked, resources=QUIET)}
        best = max(taus, key=lambda one: taus[one])
        rows: list[Row] = []
        for name, changed in BUDGETS.items():
            with patch.multiple(module, **changed) if changed else nullcontext():
                chosen = module.choose(*asked, seed=seed, resources=QUIET)
            method = str(chosen.table[chosen.table["chosen"]].index[0])
            own = 1.0 if chosen.exact else taus[method]
            rows.append(
                {
                    "budget": name,
                    "method": method,
                    "exact": chosen.exact,
                    "replayed": int(chosen.table["compared"].max()) or len(truth),
                    "predicted": chosen.predicted,
                    "tau": own,
                    "best": best,
                    "best tau": taus[best],
                    "kept tau": kendall(chosen.scores.mean(), truth),
                    "missed": taus[best] - own,
                    **{f"tau of {one}": tau for one, tau in taus.items()},
                }
            )
    return rows


def tables(frame: pd.DataFrame) -> str:
    """Tabulate a row per data set and budget, and the methods that were compared."""
    rows = []
    for (data, budget), own in frame.groupby(["data", "budget"], sort=False):
        exact = f"{int(own['exact'].sum())} of {len(own)}"
        shown = [", ".join(sorted(set(own["method"]))), spread(own["tau"]), spread(own["best tau"])]
        worst = f"{max(0.0, own['missed'].max()):.3f}"
        rows.append([SHOWN[str(data)], str(budget), exact, *shown, worst, spread(own["kept tau"])])
    head = ["data", "budget", "all exact", "chosen", "its tau", "best tau in the list", "most missed", "tau as kept"]
    once = frame[frame["budget"] == next(iter(BUDGETS))]
    names = [str(column) for column in frame if str(column).startswith("tau of ")]
    lists = [
        [SHOWN[str(data)], *(spread(own[name]) if own[name].notna().any() else "-" for name in names)]
        for data, own in once.groupby("data", sort=False)
    ]
    every = table(["data", *(name.removeprefix("tau of ") for name in names)], lists)
    return f"{SETTING}\n\n{table(head, rows)}\n\nTau of every method in the list, over all examples:\n\n{every}"


SETTING = """`leaveout train --data NAME` with its defaults, then `lo.choose` with the default budget (a minute of
replays) and with none, which is a sample of 128 replays. Tau is Kendall's, of the chosen method with exact replays of
all examples; what is kept has the replayed rows in place of their estimates. Methods with the curvature of kinks are in
the list where the kinks of a run are mild. Mean (standard deviation) over seeds."""

CHOOSING = Spec(
    "choosing",
    "The method chosen by measurement",
    seeds=3,
    cells=cells,
    compute=compute,
    tables=tables,
    naming=("data", "seed"),
)
