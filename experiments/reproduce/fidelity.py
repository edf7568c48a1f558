"""The methods compared with exact leave-one-out replays of every example: one cell of the big tables."""

from __future__ import annotations

from torch import Tensor

from experiments.reproduce.problems import QUIET, Problem, binary
from experiments.reproduce.spec import Row, Settings
from leaveout._util.trees import PARAM
from leaveout.estimators import ACC, SGDIE, Replay, score
from leaveout.estimators.query import Query
from leaveout.estimators.readout import readout_of
from leaveout.evaluate.metrics import jaccard, kendall, rmse, spearman

METHODS = (
    "SGD-IE",
    "ACC(exact)",
    "ACC(free)",
    "ACC(free, outputs readout)",
    "ACC(exact, exact readout)",
)
PERCENTS = (70, 50, 30, 10)


def compute(settings: Settings) -> list[Row]:
    """Compute a row per method: how its scores of all examples agree with the truth; seed 0 stores the scores too."""
    with binary(settings) as problem:
        truth = Replay().score(problem.run, problem.task, problem.val, resources=QUIET).mean()
        values = estimates(problem)
    rows = [{"method": name, **agreement(values[name], truth)} for name in METHODS]
    if settings["seed"] == 0:
        for row in rows:
            row |= {"estimate": _listed(values[str(row["method"])]), "truth": _listed(truth)}
    return rows


def estimates(problem: Problem) -> dict[str, Tensor]:
    """Score by all methods in three sweeps: SGD-IE shares ACC(free)'s, both exact readings share displacements."""
    run, task, val = problem.run, problem.task, problem.val
    plain, free = score([SGDIE(), ACC("free")], run, task, val, resources=QUIET)
    outputs = ACC("free", "outputs").score(run, task, val, resources=QUIET)
    exact = ACC("exact", "exact").score(run, task, val, displacements=True, resources=QUIET)
    query = Query(task, run.final()[PARAM], val, single=False)
    linear = readout_of("linear").of_displacements(query, exact.displacements or {})
    values = {scores.method: scores.mean() for scores in (plain, free, outputs, exact)}
    return {**values, "ACC(exact)": linear.mean(1)}


def agreement(estimate: Tensor, truth: Tensor) -> dict[str, float]:
    """Compute the tables' columns."""
    return {
        "rmse": rmse(estimate, truth),
        "kendall": kendall(estimate, truth),
        "spearman": spearman(estimate, truth),
        **{f"jaccard@{percent}": jaccard(estimate, truth, percent) for percent in PERCENTS},
        "spread": float(truth.double().std()),
    }


def _listed(values: Tensor) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]
