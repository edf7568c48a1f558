"""Where the error of a score comes from: the displacement, or how it is read.

The displacements of SGD-IE, of ACC and of real retraining are read linearly and exactly. The error that remains with
the real displacement is that of the reading, not of an estimator.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from experiments.reproduce.fidelity import agreement
from experiments.reproduce.markdown import spread, table
from experiments.reproduce.problems import QUIET, binary
from experiments.reproduce.spec import Row, Settings, Spec
from experiments.reproduce.tables import NOISE, QUICK, SETTINGS, SHOWN, named
from leaveout._util.trees import PARAM, Params, each, inner_rows
from leaveout.estimators import ACC, SGDIE, Replay
from leaveout.estimators.query import Query
from leaveout.estimators.readout import readout_of

REAL = "real displacement"
READINGS = ("linear", "exact")


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List all three data sets, clean and with the most label noise; networks for a quarter of the seeds."""
    return [
        {"data": name, "model": model, "noise": noise, "level": level, **(QUICK if quick else SETTINGS), "seed": seed}
        for seed in range(seeds)
        for model in ("logistic", *(("mlp",) if 4 * seed < seeds else ()))
        for name in NOISE
        for noise, level in (NOISE[name][0], NOISE[name][-1])
    ]


def compute(settings: Settings) -> list[Row]:
    """Return a row for each displacement and reading of it."""
    with binary(settings) as problem:
        question = (problem.run, problem.task, problem.val)
        real = Replay().score(*question, displacements=True, resources=QUIET)
        moved = {
            method.name: method.score(*question, displacements=True, resources=QUIET).displacements or {}
            for method in (SGDIE(), ACC("exact"))
        } | {REAL: real.displacements or {}}
        query = Query(problem.task, problem.run.final()[PARAM], problem.val, single=False)
        return [
            {
                "displacement": name,
                "reading": reading,
                **agreement(readout_of(reading).of_displacements(query, stack).mean(1), real.mean()),
                "missed": distance(stack, moved[REAL]),
            }
            for name, stack in moved.items()
            for reading in READINGS
        ]


def distance(stack: Params, real: Params) -> float:
    """Compute mean ‖δ − δ*‖ over mean ‖δ*‖."""
    apart = each(lambda a, b: (a - b).double(), stack, real)
    size = each(lambda a: a.double(), real)
    return float(inner_rows(apart, apart).sqrt().mean() / inner_rows(size, size).sqrt().mean())


def tables(frame: pd.DataFrame) -> str:
    """Tabulate RMSE and tau by displacement and reading, and how far the displacement is from the real one."""
    rows = []
    keys = ["model", "data", "noise", "level", "displacement"]
    for (model, name, noise, level, moved), part in frame.groupby(keys, sort=False):
        place = ["logistic" if model == "logistic" else "8-8 network", SHOWN[str(name)], named(str(noise), level)]
        shown = [str(moved), spread(part["missed"], small=True)]
        for reading in READINGS:
            own = part[part["reading"] == reading]
            shown += [spread(own["rmse"], small=True), spread(own["kendall"])]
        rows.append([*place, *shown, str(part["seed"].nunique())])
    head = ["model", "data", "noise", "displacement", "its relative error"]
    columns = [f"{what}, {reading}" for reading in READINGS for what in ("RMSE", "tau")]
    return f"{SETTING}\n\n" + table([*head, *columns, "seeds"], rows)


SETTING = """The settings of the tables. The relative error of a displacement is the mean ‖δ − δ*‖ over the mean ‖δ*‖,
δ* from real retraining. Linear: ⟨∇L, δ⟩. Exact: L(θ + δ) − L(θ). The real displacement read exactly is the truth, up
to rounding."""

READOUTS = Spec(
    "readouts",
    "Displacement or reading: where the error of a score comes from",
    seeds=20,
    cells=cells,
    compute=compute,
    tables=tables,
    naming=("data", "model", "noise", "level", "seed"),
)
