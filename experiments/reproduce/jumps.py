"""The jump in all its readings, of single examples and of groups, from one sweep, for comparison in experiments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from experiments.reproduce.networks import Trained
from experiments.reproduce.plots import Panel, Plot, Series
from experiments.reproduce.problems import QUIET
from experiments.reproduce.spec import Row
from leaveout._util.trees import PARAM, nbytes
from leaveout.compute.resources import Resources
from leaveout.estimators import ACC
from leaveout.estimators.choice import Choice
from leaveout.estimators.question import Question
from leaveout.estimators.readout import readout_of
from leaveout.evaluate.metrics import kendall, rmse
from leaveout.evaluate.metrics.per_query import PerQuery, spearman_columns
from leaveout.sweep.jump import ROW, Reading
from leaveout.sweep.saturation import Saturation
from leaveout.sweep.sweep import Sweep
from leaveout.trajectory.left_out import LeftOut

PLAIN, JUMP, DERIVATIVE = "SGD-IE", "ACC(jump)", "ACC(jump, moments by derivative)"


class ByDerivative(ACC):
    """The jump with the change of the moments read by their derivative, without saturation."""

    @property
    def name(self) -> str:
        """The method's name."""
        return DERIVATIVE

    def choice(self) -> Choice:
        """Return the same without saturation."""
        return replace(super().choice(), saturated=False)


def readings(
    problem: Trained, rows: Mapping[str, LeftOut], resources: Resources = QUIET
) -> dict[str, dict[str, np.ndarray]]:
    """Read every set of rows, a column per query: SGD-IE, the jump, and the jump with its moments by derivative.

    The examples of a row leave a batch in one jump. All query vectors are swept at once.
    """
    question = Question(problem.run, problem.task, problem.val, "each", resources=resources)
    request = ACC("jump").request(question)
    trajectory, readout = request.trajectory, readout_of("linear")
    vectors = readout.part(request.query, 0, readout.count(request.query))  # type: ignore[attr-defined]
    like = next(iter(vectors.values()))
    totals = {
        name: {method: like.new_zeros(len(left_out), len(like)) for method in (PLAIN, JUMP, DERIVATIVE)}
        for name, left_out in rows.items()
    }
    chunk = resources.chunk(2 * ROW * nbytes(trajectory.initial()), problem.run.record(0).ids.numel())
    saturated, derivative = Reading(Saturation(trajectory.rule, trajectory.final()[PARAM]), chunk), Reading(None, chunk)
    for recorded, pulled in Sweep(trajectory).pulled(vectors, resources, request.cost):
        base = None
        for name, left_out in rows.items():
            ids = recorded.record.ids
            pairs = left_out.pairs(ids)
            if len(pairs[0]):
                pulled.add_to(totals[name][PLAIN], pairs)
                base = saturated.add(totals[name][JUMP], pairs, ids, pulled)
                derivative.add(totals[name][DERIVATIVE], pairs, ids, pulled)
        saturated.count_step(pulled, base)
    return {name: {method: t.double().numpy() for method, t in own.items()} for name, own in totals.items()}


def compared(method: str, estimate: np.ndarray, truth: np.ndarray, *, points: bool) -> Row:
    """Compare scores with the truth, a row per left-out example or group and a column per query.

    ``points`` adds the means over queries themselves, for a plot.
    """
    means = estimate.mean(1), truth.mean(1)
    row: Row = {
        "method": method,
        "per_query": PerQuery("", spearman_columns(estimate, truth), len(truth)).value,
        "kendall": kendall(*means),
        "off": rmse(*means) / float(means[1].std()),
    }
    return {**row, **({"estimate": means[0].tolist(), "truth": means[1].tolist()} if points else {})}


def clouds(frame: pd.DataFrame, by: str, name: str, title: str) -> list[Plot]:
    """Plot estimate against truth, a panel per value of a column, from the rows that have points."""
    drawn = frame[frame["estimate"].notna()] if "estimate" in frame else frame[:0]
    methods = list(dict.fromkeys(drawn["method"]))
    panels = [
        Panel(
            str(value),
            [
                Series(row["method"], row["truth"], row["estimate"], methods.index(row["method"]), points=True)
                for _, row in own.iterrows()
            ],
            "true change of the loss",
            "estimate",
            diagonal=True,
        )
        for value, own in drawn.groupby(by, sort=False)
    ]
    return [Plot(name, title, panels)] if panels else []
