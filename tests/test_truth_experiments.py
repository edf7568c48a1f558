"""Cells of the experiments on when there is a truth, compared with plain calls; and their tables."""

import pandas as pd
import pytest

import leaveout as lo
from leaveout.paper.reproduce import SPECS, networks, smoothness

SMALL = {"data": "digits", "n": 30, "queries": 10, "hidden": [6], "dtype": "float64", "epochs": 2, "batch": 10}
SMALL |= {"optimizer": "sgd", "lr": 0.1, "activation": "gelu", "schedule": "constant", "seed": 1}


def shown(name: str, settings: dict, rows: list[dict]) -> str:
    return SPECS[name].tables(pd.DataFrame([{**settings, **row} for row in rows]))


def test_a_rate_that_falls_ends_at_zero():
    with networks.network({**SMALL, "schedule": "linear"}) as problem:
        rates = [problem.run.record(step).hypers[0]["lr"] for step in range(len(problem.run))]
    assert rates == pytest.approx([0.1 * (1 - step / 6) for step in range(6)])


def test_smoothness_is_measured_beside_the_ranking_of_sgd_ie():
    settings = {**SMALL, "replays": 12, "training": "SGD", "change": "GELU"}
    (row,) = smoothness.compute(settings)
    with networks.network(settings) as problem:
        measured = lo.smoothness(problem.run, problem.task)
        truth = lo.Replay().score(problem.run, problem.task, problem.val, ids=range(12)).mean()
        scores = lo.SGDIE().score(problem.run, problem.task, problem.val).mean()[:12]
    assert row["agreement"] == pytest.approx(measured.agreement, abs=1e-9)
    assert row["kendall"] == pytest.approx(lo.metrics.kendall(scores, truth))
    assert "| SGD | GELU |" in shown("smoothness", settings, [row])
    cells = smoothness.cells(1, quick=False)
    assert {cell["eps"] for cell in cells if cell["training"] == "SGD"} == {None}
    assert len({SPECS["smoothness"].file(cell) for cell in cells}) == len(cells) == 19
