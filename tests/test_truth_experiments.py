"""Cells of the experiments on when there is a truth, compared with plain calls; and their tables."""

import os
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import leaveout as lo
from experiments.reproduce import SPECS, adam, ceiling, choosing, kinks, lds, networks, smoothness, tsloo, words
from experiments.reproduce import jumps as jumps_of
from leaveout.trajectory.left_out import leave_out

SMALL = {"data": "digits", "n": 30, "queries": 10, "hidden": [6], "dtype": "float64", "epochs": 2, "batch": 10}
SMALL |= {"optimizer": "sgd", "lr": 0.1, "activation": "gelu", "schedule": "constant", "seed": 1}

REAL = pytest.mark.skipif(not os.environ.get("LEAVEOUT_DATA"), reason="LEAVEOUT_DATA is not set")


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


def test_kinks_are_measured_beside_plain_products():
    settings = {**SMALL, "activation": "relu", "replays": 12, "network": "small"}
    rows = kinks.compute(settings)
    with networks.network(settings) as problem:
        asked = (problem.run, problem.task, problem.val)
        truth = lo.Replay().score(*asked, ids=range(12)).mean()
        scores = lo.SGDIE(kinks=True).score(*asked).mean()[:12]
    (row,) = (row for row in rows if row["method"] == "SGD-IE(kinks)")
    assert row["kendall"] == pytest.approx(lo.metrics.kendall(scores, truth))
    assert row["relative error"] == pytest.approx(float((scores - truth).square().mean().sqrt() / truth.std()))
    assert "| small |" in shown("kinks", settings, rows)
    cells = kinks.cells(2, quick=False)
    assert len({SPECS["kinks"].file(cell) for cell in cells}) == len(cells) == 22


def test_the_ceiling_is_the_mean_spearman_between_moved_starts():
    settings = {**SMALL, "replays": 10, "moves": 3, "jitter": 0.1, "scaled": True}
    (row,) = ceiling.compute(settings)
    with networks.network(settings) as problem:
        asked = (problem.run, problem.task, problem.val)
        truths = {move: lo.Replay(move=move, jitter=0.1).score(*asked).mean().numpy() for move in range(3)}
        scores = lo.SGDIE().score(*asked).mean().numpy()
    chosen = ceiling.left_out(settings)
    assert len(set(chosen)) == 10
    pairs = [stats.spearmanr(truths[i][chosen], truths[j][chosen]).statistic for i, j in combinations(range(3), 2)]
    assert row["between moves"] == pytest.approx(np.mean(pairs))
    mean = np.mean([truth[chosen] for truth in truths.values()], axis=0)
    assert row["SGD-IE and mean"] == pytest.approx(stats.spearmanr(scores[chosen], mean).statistic)
    assert row["groups"] == ""
    assert "| GELU, pixels standardised, moved by 1e-01 |" in shown("ceiling", settings, [row])


@pytest.mark.full
def test_the_choice_is_compared_with_every_method_in_the_list():
    settings = {"data": "digits", "n": 140, "epochs": 1, "seed": 0}
    rows = choosing.compute(settings)
    assert [row["budget"] for row in rows] == ["a minute", "none"]
    assert (rows[0]["exact"], rows[0]["tau"], rows[1]["exact"]) == (True, 1.0, False)
    assert [row["replayed"] for row in rows] == [140, 128]
    assert rows[1]["tau"] == rows[1][f"tau of {rows[1]['method']}"] == rows[1]["best tau"] - rows[1]["missed"]
    assert "| digits | none | 0 of 1 |" in shown("choosing", settings, rows)


def measured_ids(settings):
    order = torch.Generator().manual_seed(settings["seed"])
    return torch.randperm(settings["n"], generator=order)[: settings["replays"]].tolist()


def test_adam_is_scored_by_every_reading_of_the_jump():
    settings = {**adam.CASES["tanh 64-12-10, Adam 0.01"], "n": 24, "queries": 4, "epochs": 1, "batch": 8, "seed": 0}
    rows = {row["method"]: row for row in adam.compute(settings)}
    with networks.network(settings) as problem:
        asked = (problem.run, problem.task, problem.val)
        jumps, truth = (one.score(*asked).mean() for one in (lo.ACC(), lo.Replay()))
        groups = {"a": [0, 1, 2], "b": [2, 20]}
        read = jumps_of.readings(problem, {"": leave_out(24, groups=groups)})[""]
        plain = lo.SGDIE().score(*asked, queries="each", groups=groups).values
    assert rows["ACC(jump)"]["estimate"] == pytest.approx(jumps.tolist())
    assert rows["ACC(jump)"]["kendall"] == pytest.approx(lo.metrics.kendall(jumps, truth))
    assert set(rows) == {"SGD-IE", "ACC(jump)", "ACC(jump, moments by derivative)", "ACC(exact)"}
    assert read["SGD-IE"] == pytest.approx(plain.numpy())
    assert not np.allclose(read["ACC(jump)"], read["ACC(jump, moments by derivative)"], rtol=1e-3)


@REAL
@pytest.mark.full
def test_the_small_gpt_is_scored_query_by_query():
    settings = {**tsloo.GPT, "n": 24, "queries": 3, "replays": 6, "lr": 1e-3, "batch": 12, "case": "x", "seed": 0}
    settings["dtype"] = "float64"
    rows = {row["method"]: row for row in tsloo.compute(settings)}
    with words.small_gpt(settings) as problem:
        asked = (problem.run, problem.task, problem.val)
        scores = lo.SGDIE().score(*asked, queries="each")
        measured = lo.metrics.tsloo(scores, *asked, replays=6, seed=0)
        jumps = lo.ACC().score(*asked, ids=measured_ids(settings)).mean()
    assert rows["SGD-IE"]["per_query"] == pytest.approx(measured.value)
    assert set(rows) == {"ACC(jump)", "ACC(jump, moments by derivative)", "SGD-IE"}
    assert rows["ACC(jump)"]["estimate"] == pytest.approx(jumps.tolist())
    assert "| x | SGD-IE |" in shown("tsloo", settings, rows.values())
    tokens = words.sequences()
    assert (tokens.shape[1], int(tokens.min()), int(tokens.max())) == (33, 0, 499)


def test_the_algorithm_s_lds_gains_from_more_runs_or_not_but_is_that_of_the_average():
    settings = {**lds.ALGORITHM, "n": 30, "queries": 3, "subsets": 4, "repeats": 2, "runs": 2, "epochs": 1, "seed": 0}
    rows = lds.compute(settings)
    assert [row["of"] for row in rows] == ["one run", "mean of 2 runs"] * 2
    assert all(0 <= row["ceiling"] <= 1 for row in rows)
    assert "| mean of 2 runs | SGD-IE |" in shown("lds", settings, rows)
