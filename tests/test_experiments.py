"""What single experiments compute, against plain calls and dense matrices."""

import math
import os

import pandas as pd
import pytest
import torch
from torch import nn

import leaveout as lo
from experiments.reproduce import (
    SPECS,
    along,
    bounds,
    cleansing,
    epochs,
    groups,
    labels,
    mismatch,
    problems,
    readouts,
    removal,
)
from experiments.reproduce.fidelity import METHODS
from experiments.reproduce.label_runs import mislabelled
from experiments.reproduce.markdown import number
from experiments.reproduce.plots import interactive, png

SMALL = {"data": "digits-1v7", "model": "mlp", "noise": "clean", "level": 0.0, "n": 16, "batch": 8}
SMALL |= {"lr": 0.2, "epochs": 6, "l2": 0.01, "dtype": "float64", "seed": 1}
REAL = pytest.mark.skipif(not os.environ.get("LEAVEOUT_DATA"), reason="LEAVEOUT_DATA is not set")


def test_one_pass_gives_what_separate_runs_of_every_length_give():
    with problems.binary({**SMALL, "epochs": 4}) as problem:
        marks = [3, 8]
        for found, method in (
            (along.displaced(problem, marks, corrected=True), lo.ACC("exact")),
            (along.displaced(problem, marks, corrected=False), lo.SGDIE()),
            (along.replayed(problem, marks), lo.Replay()),
        ):
            steps = []
            for step, moved in found:
                steps.append(step)
                head = problem.run.head(step)
                expected = method.score(head, problem.task, problem.val, displacements=True)
                for name, tensor in expected.displacements.items():
                    assert torch.allclose(moved[name], tensor, atol=1e-12), (method.name, step)
                if not isinstance(method, lo.Replay):
                    linear = along.changes(problem, step, moved, "linear")
                    assert torch.allclose(linear, expected.mean(), atol=1e-12)
                else:
                    assert torch.allclose(along.changes(problem, step, moved, "exact"), expected.mean(), atol=1e-12)
            assert steps == marks


@pytest.mark.full
def test_epochs_rows_are_those_of_a_shorter_run():
    rows = epochs.compute(SMALL)
    assert {row["epoch"] for row in rows} == {2, 6}
    with problems.binary({**SMALL, "epochs": 2}) as short:
        truth = lo.Replay().score(short.run, short.task, short.val).mean()
        for method in (lo.SGDIE(), lo.ACC("free"), lo.ACC("exact", "exact")):
            scores = method.score(short.run, short.task, short.val)
            row = next(row for row in rows if row["method"] == scores.method and row["epoch"] == 2)
            assert row["rmse"] == pytest.approx(lo.metrics.rmse(scores.mean(), truth), rel=1e-6)
    assert "| 8-8 network | 8 | 0.2 | SGD-IE |" in shown("epochs", SMALL, rows)


def test_groups_are_compared_with_real_retraining():
    settings = {**SMALL, "epochs": 2, "groups": 5, "shares": [0.05, 0.2], "seed": 0}
    rows = groups.compute(settings)
    assert [row["method"] for row in rows] == [*METHODS, *METHODS]
    chosen = groups.drawn(16, settings["shares"], 5, 0)
    assert [len(set(group)) for group in chosen.values()] == [1] * 5 + [3] * 5
    with problems.binary(settings) as problem:
        single = lo.SGDIE().score(problem.run, problem.task, problem.val).mean()
        truth = lo.Replay().score(problem.run, problem.task, problem.val, groups=chosen).mean()
    for place, row in enumerate(rows[:: len(METHODS)]):
        own = list(chosen.values())[5 * place : 5 * place + 5]
        assert row["method"] == "SGD-IE"
        assert row["estimate"] == pytest.approx([float(single[group].sum()) for group in own], abs=1e-9)
        assert row["truth"] == pytest.approx(truth[5 * place : 5 * place + 5].tolist(), abs=1e-9)
    assert "| 8-8 network | digits | SGD-IE |" in shown("groups", settings, rows)


def dense(theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor, l2: float):
    """Gradient and Hessian of one example's loss, written out."""
    full = torch.cat([x, torch.ones(1, dtype=x.dtype)])
    chance = torch.sigmoid(full @ theta)
    return (chance - y) * full + l2 * theta, chance * (1 - chance) * torch.outer(full, full) + l2 * torch.eye(len(full))


def test_constants_bound_what_they_should():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    l2 = 0.2
    start = {"weight": torch.zeros(1, 3).double(), "bias": torch.zeros(1).double()}
    known = bounds.constants(x, start, l2)
    radius = (known["G"] - math.sqrt(float((x.square().sum(1) + 1).max()))) / l2
    tight = 0.0
    for _ in range(300):
        a, b = (torch.randn(4, dtype=torch.float64, generator=generator) for _ in range(2))
        a, b = (v / v.norm() * min(float(v.norm()), radius) for v in (a, b))
        for row in x:
            gradient, first = dense(a, row, torch.tensor(0.0), l2)
            second = dense(b, row, torch.tensor(0.0), l2)[1]
            values = torch.linalg.eigvalsh(first)
            assert known["lambda"] - 1e-9 <= float(values[0])
            assert float(values[-1]) <= known["Lambda"] + 1e-9
            assert float(gradient.norm()) <= known["G"] + 1e-9
            ratio = float(torch.linalg.matrix_norm(first - second, 2) / (a - b).norm())
            tight = max(tight, ratio / known["L"])
    assert 0.5 < tight <= 1 + 1e-9  # a bound, and not a wasteful one


def test_bounds_and_conditions_by_hand():
    known = {"lambda": 0.1, "Lambda": 0.6, "L": 0.27, "G": 2.8}
    assert bounds.conditions(known, 1.0, 100)
    assert not bounds.conditions(known, 1.7, 100)  # above 1/Λ
    assert not bounds.conditions(known, 1.0, 23)  # below 4Λ/λ
    found = bounds.convex_bounds(known, 0.5, 10, torch.tensor([1, 4]))
    assert found["SGD-IE"].tolist() == pytest.approx([5.6, 1.4])
    assert found["ACC(exact)"].tolist() == pytest.approx([0.14, 0.14 * 0.975**3])


def test_errors_of_displacements_are_norms_over_all_parameters():
    with problems.binary(SMALL) as problem:
        found = bounds._errors(problem, [12])
        truth = lo.Replay().score(problem.run, problem.task, problem.val, displacements=True).displacements
        guess = lo.ACC("exact").score(problem.run, problem.task, problem.val, displacements=True).displacements
        expected = sum((truth[name] - guess[name]).flatten(1).square().sum(1) for name in truth).sqrt()
        assert torch.allclose(found["ACC(exact)"][12]["error"], expected, atol=1e-12)
        first = bounds._first(problem)
        assert set(first.tolist()) == {0, 1}
        assert set(problem.run.record(0).ids.tolist()) == set((first == 0).nonzero().flatten().tolist())


@REAL
@pytest.mark.full
def test_a_cleansing_cell():
    cell = {**cleansing.cells(1, True)[1], "n": 200, "val": 100, "test": 100, "epochs": 1, "remove": [20], "random": 1}
    rows = cleansing.compute(cell)
    assert [row["choice"] for row in rows] == ["nothing", "SGD-IE", "ACC(free)", "TracIn", "random"]
    assert all(row["flipped_all"] == 20 for row in rows)
    found = lo.data.load("mnist", 200, 100, seed=0)
    noisy = lo.data.flip(found.train, 0.1, 0)
    model = lo.models.build("mnist-cnn", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for ids in torch.randperm(200, generator=torch.Generator().manual_seed(0)).split(64):
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(noisy.examples.x[ids]), noisy.examples.y[ids]).backward()
        optimizer.step()
    with torch.no_grad():
        error = (model(found.test.x[:100]).argmax(1) != found.test.y[:100]).double().mean()
    assert rows[0]["error"] == pytest.approx(float(error), abs=0.011)


def shown(name: str, cell: dict, rows: list[dict]) -> str:
    """The Markdown of some rows; their plots must draw, both ways."""
    frame = pd.DataFrame([{**cell, **row} for row in rows])
    for plot in SPECS[name].plots(frame):
        assert plot.panels
        assert png(plot).startswith(b"\x89PNG")
        assert len(interactive(plot).data) >= len(plot.panels)
    return SPECS[name].tables(frame)


def test_bounds_of_a_small_problem_hold():
    cell = {**bounds.cells(1, True)[0], "data": "digits-1v7", "epochs": [1, 4]}
    rows = bounds.compute(cell)
    assert [(row["steps"], row["method"]) for row in rows] == [
        (steps, method) for method in bounds.ESTIMATES for steps in (2, 8)
    ]
    assert all(row["holds"] and row["above"] == 0.0 and row["error"] < row["bound"] for row in rows)
    assert rows[3]["error"] < rows[1]["error"]  # ACC is closer than SGD-IE once examples come back
    text = shown("bounds", cell, rows)
    assert f"| digits-1v7 | inside | yes | ACC(exact) | 8 | {number(rows[3]['error'], True)} |" in text


def test_networks_grow():
    cell = {**bounds.cells(1, True)[-1], "data": "digits-1v7", "n": 12, "batch": 6, "epochs": [1, 2]}
    rows = bounds.compute(cell)
    assert {row["steps"] for row in rows} == {2, 4}
    assert all(0 < row["error"] <= row["largest"] for row in rows)


def test_the_written_out_recurrence_is_sgd_ie():
    settings = {**SMALL, "model": "logistic", "noise": "feature", "level": 0.5, "n": 40}  # more rows than features
    with problems.binary(settings) as problem:
        expected = lo.SGDIE().score(problem.run, problem.task, problem.val).mean()
        found = mismatch.recurrence(problem, problem.task.train_set, settings["l2"])
        assert torch.allclose(found, expected, atol=1e-12)
    rows = mismatch.compute(settings)
    assert rows[0]["kendall"] > rows[1]["kendall"]
    assert "| digits | feature 0.5 | another draw of the noise |" in shown("mismatch", settings, rows)


def test_readings_of_displacements_are_those_of_the_estimators():
    rows = {(row["displacement"], row["reading"]): row for row in readouts.compute(SMALL)}
    with problems.binary(SMALL) as problem:
        asked = (problem.run, problem.task, problem.val)
        real = lo.Replay().score(*asked, displacements=True)
        for method, key in (
            (lo.SGDIE(), ("SGD-IE", "linear")),
            (lo.ACC("exact", "linear"), ("ACC(exact)", "linear")),
            (lo.ACC("exact", "exact"), ("ACC(exact)", "exact")),
        ):
            scores = method.score(*asked, displacements=True)
            assert rows[key]["rmse"] == pytest.approx(lo.metrics.rmse(scores.mean(), real.mean()), rel=1e-9)
            flat = [torch.cat([t.flatten(1) for t in s.displacements.values()], 1) for s in (scores, real)]
            missed = (flat[0] - flat[1]).norm(dim=1).mean() / flat[1].norm(dim=1).mean()
            assert rows[key]["missed"] == pytest.approx(float(missed), rel=1e-9)
    assert rows[readouts.REAL, "exact"]["rmse"] < 1e-12 < rows[readouts.REAL, "linear"]["rmse"]
    assert rows[readouts.REAL, "linear"]["missed"] == 0
    text = shown("readouts", SMALL, list(rows.values()))
    assert "| 8-8 network | digits | clean | real displacement |" in text


def test_flipped_labels_are_ranked_by_every_signal():
    small = {"n": 120, "val": 40, "epochs": 6, "replays": 8}
    seen, asked = ({**cell, **small} for cell in (labels.cells(1, False)[0], labels.cells(1, False)[5]))
    assert (seen["signals"], asked["signals"], asked["data"]) == ("dynamics", "influence", "digits")
    rows = {row["method"]: row for cell in (seen, asked) for row in labels.compute(cell)}
    assert list(rows)[:3] == ["labels()", "labels(folds=None)", "labels(folds=5)"]
    assert rows["labels()"]["wrong"] == 12
    with mislabelled(seen) as problem:
        final, wrong = problem.run.final()["param"], problem.wrong
        x, y = problem.task.train_set.tensors
        loss = nn.functional.cross_entropy(
            torch.func.functional_call(problem.task.model, final, (x,)), y, reduction="none"
        )
        first = loss.argsort(descending=True)[:12]
        assert rows["last loss"]["found"] == pytest.approx(float(wrong[first].double().mean()))
        expected = lo.SGDIE().score(problem.run, problem.task, problem.val).harmful(12)
        assert rows["SGD-IE"]["found"] == pytest.approx(float(wrong[expected].double().mean()))
        chosen = lo.labels(problem.run, problem.task)  # what the experiment puts together is what labels() does
        assert rows["labels()"]["issues"] == len(chosen)
        assert rows["labels()"]["misfit"] == chosen.misfit
    assert "| labels() |" in shown("labels", seen, list(rows.values()))


def test_removed_examples_are_the_first_of_each_ranking():
    cell = {**removal.cells(1, False)[0], "n": 100, "val": 40, "epochs": 4, "remove": [5, 20]}
    assert removal.cells(1, False)[0]["remove"] == [10, 30, 100, 300]
    rows = removal.compute(cell)
    by = {(row["choice"], row["removed"]): row for row in rows}
    assert len(rows) == 1 + 5 * 2
    with mislabelled(cell) as problem:
        run, task = problem.run, problem.task
        worst = lo.SGDIE().score(run, task, problem.val).mean().argsort()[:20].tolist()
        assert by["SGD-IE", 20]["caught"] == int(problem.wrong[worst].sum())
        left = lo.labels(run, task).ranked(20).index.tolist()
        assert by["labels()", 20]["caught"] == int(problem.wrong[left].sum())
    text = shown("removal", cell, rows)
    assert "| SGD-IE |" in text
    assert "digits, 1 seed" in text
