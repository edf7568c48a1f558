"""The runner on real small cells: nothing is computed twice, results come from files, and the commands work."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import leaveout as lo
from commands import Shell
from experiments import __main__ as experiments
from experiments.reproduce import SPECS, problems, report, runner
from experiments.reproduce.fidelity import METHODS, compute
from experiments.reproduce.tables import CONVEX
from refusal import refused

SMALL = {"data": "digits-1v7", "model": "logistic", "noise": "clean", "level": 0.0, "n": 20, "batch": 10}
SMALL |= {"lr": 0.1, "epochs": 3, "l2": 0.01, "dtype": "float64"}
REAL = pytest.mark.skipif(not os.environ.get("LEAVEOUT_DATA"), reason="LEAVEOUT_DATA is not set")


def light(settings):
    """A real cell that takes a moment: one method on a few examples."""
    with problems.binary(settings) as problem:
        run, task, val = problem.run, problem.task, problem.val
        truth = lo.Replay().score(run, task, val, resources=problems.QUIET).mean()
        scores = lo.TracIn().score(run, task, val, resources=problems.QUIET)
    return [{"method": scores.method, "rmse": lo.metrics.rmse(scores.mean(), truth)}]


def cells(seeds, quick):
    return [{**SMALL, "n": 12, "epochs": 1 if quick else 2, "seed": seed} for seed in range(seeds)]


@pytest.fixture
def spec():
    return replace(CONVEX, name="small", seeds=2, cells=cells, compute=light)


def files(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in (folder / "cells").iterdir()}


def test_a_cell_holds_what_plain_calls_give():
    rows = {row["method"]: row for row in compute({**SMALL, "seed": 1})}
    found = lo.data.load("digits-1v7", 20, 20, seed=1)
    model = lo.models.build("logistic", seed=1, features=64).double()
    train, val = (lo.data.Examples(p.x.double(), p.y.double(), p.ids) for p in (found.train, found.val))
    task = lo.Task(model, nn.BCEWithLogitsLoss(), train, l2=0.01)
    with tempfile.TemporaryDirectory() as folder:
        run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.1), 3, 10, 1, Path(folder) / "run")
        truth = lo.Replay().score(run, task, val).mean()
        methods = (lo.SGDIE(), lo.ACC("exact"), lo.ACC("free"), lo.ACC("free", "outputs"), lo.ACC("exact", "exact"))
        for name, method in zip(METHODS, methods, strict=True):
            scores = method.score(run, task, val)
            assert scores.method == name
            assert rows[name]["rmse"] == pytest.approx(lo.metrics.rmse(scores.mean(), truth), rel=1e-6)
            assert rows[name]["kendall"] == pytest.approx(lo.metrics.kendall(scores.mean(), truth))
            assert rows[name]["jaccard@10"] == pytest.approx(lo.metrics.jaccard(scores.mean(), truth, 10))


def test_finished_cells_are_not_computed_again_and_changed_settings_are(tmp_path, spec):
    assert runner.compute(spec, tmp_path, 1) == 1
    before = files(tmp_path / "small")
    assert runner.compute(spec, tmp_path, 2) == 1
    assert runner.compute(spec, tmp_path, 2) == 0
    assert before.items() <= files(tmp_path / "small").items()
    changed = replace(spec, cells=lambda seeds, quick: [{**cell, "l2": 0.1} for cell in cells(seeds, quick)])
    assert runner.compute(changed, tmp_path, 2) == 2
    assert len(files(tmp_path / "small")) == 4
    assert set(runner.finished(changed, tmp_path)["l2"]) == {0.1}
    assert set(runner.finished(spec, tmp_path)["l2"]) == {0.01}


def test_parts_share_the_cells(tmp_path, spec):
    assert runner.compute(spec, tmp_path, 2, part=(2, 2)) == 1
    assert set(runner.finished(spec, tmp_path)["seed"]) == {1}
    assert runner.compute(spec, tmp_path, 2, part=(1, 2)) == 1
    assert runner.compute(spec, tmp_path, 2) == 0
    with refused(lo.InputError, "part-does-not-exist", "1/2 to 2/2"):
        runner.compute(spec, tmp_path, part=(3, 2))


def test_results_that_could_not_be_written_are_not_computed(tmp_path, spec):
    (tmp_path / "file").write_text("mine")
    idle = replace(spec, compute=lambda settings: pytest.fail("it computed before it looked"))
    for out in (tmp_path / "file", tmp_path / ("x" * 300)):
        with refused(lo.RunError, "file-not-writable"):
            runner.compute(idle, out, 1)
        with refused(lo.RunError, "cells-missing"):
            report.write(idle, out, 1)


def test_damaged_or_foreign_cells_are_named(tmp_path, spec):
    runner.compute(spec, tmp_path, 1)
    file = next((tmp_path / "small" / "cells").iterdir())
    told = json.loads(file.read_text())
    file.write_text(json.dumps({**told, "settings": {**told["settings"], "lr": 1.0}}))
    with refused(lo.RunError, "cell-unreadable"):
        runner.finished(spec, tmp_path)
    for damaged in ("{", "[" * 100_000):
        file.write_text(damaged)
        with refused(lo.RunError, "cell-unreadable", file.name):
            runner.finished(spec, tmp_path)
    with refused(lo.RunError, "cells-missing"):
        runner.finished(spec, tmp_path / "elsewhere")


def four_seeds(out: Path, log: Path, nap: float = 0.0) -> None:
    """Computes four cells and notes each in the log; at the third it may take a nap."""

    def noted(settings):
        with log.open("a") as notes:
            notes.write(f"{settings['seed']}\n")
        rows = light(settings)
        if settings["seed"] == 2:
            time.sleep(nap)
        return rows

    runner.compute(replace(CONVEX, name="small", seeds=4, cells=cells, compute=noted), out)


def test_a_killed_run_goes_on_where_it_stopped(tmp_path):
    log = tmp_path / "log"
    program = f"from test_reproduce import *; four_seeds(Path({str(tmp_path)!r}), Path({str(log)!r}), 600)"
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", program], env=here)
    deadline = time.monotonic() + 120
    while not (log.exists() and "2" in log.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = files(tmp_path / "small")
    assert len(done) == 2
    four_seeds(tmp_path, log)
    assert done.items() <= files(tmp_path / "small").items()
    assert log.read_text().split() == ["0", "1", "2", "2", "3"]


def test_tables_and_plots_come_from_the_cells(tmp_path):
    """The published table's layout, filled with made-up cells whose means are known."""
    settings = CONVEX.cells(2, False)
    folder = tmp_path / "convex" / "cells"
    folder.mkdir(parents=True)
    for cell in settings:
        rows = []
        for rank, method in enumerate(METHODS):
            metrics = {"rmse": 0.001 * (5 - rank) * (1 + cell["seed"]), "kendall": 0.5 + 0.1 * rank, "spearman": 0.9}
            metrics |= {f"jaccard@{p}": 0.5 for p in (70, 50, 30, 10)} | {"spread": 0.01}
            rows.append({"method": method, **metrics})
            if cell["seed"] == 0:
                rows[-1] |= {"estimate": [0.0, 1.0], "truth": [0.5, 1.0]}
        told = {"settings": cell, "seconds": 1.0, "rows": rows}
        (folder / CONVEX.file(cell)).write_text(json.dumps(told))
    where = report.write(CONVEX, tmp_path)
    text = (where / "table.md").read_text()
    assert "| Adult | clean | SGD-IE | 7.50e-3 (3.54e-3) | 0.500 (0.000) |" in text
    assert "| Adult | clean | ACC(exact, exact readout) | **1.50e-3 (7.07e-4)** | **0.900 (0.000)** |" in text
    assert "*paper: ACC-SGD-IE* | *1.00e-4 (1.00e-4)* | *0.977 (0.000)* |" in text
    assert "| ACC(free) | 14 of 14 | 14 of 14 | 14 of 14 | nowhere |" in text
    frame = pd.read_parquet(where / "results.parquet")
    assert len(frame) == 14 * 2 * 5
    assert frame["rmse"].mean() == pytest.approx(0.001 * 3 * 1.5)
    for name in ("adult", "20news", "mnist-1v7"):
        assert (where / f"scatter-{name}.png").read_bytes().startswith(b"\x89PNG")
    page = report.page(SPECS.values(), tmp_path).read_text()
    assert page.count("Plotly.newPlot(") >= 3
    assert not re.search(r"<script[^>]+src=", page)


def test_narrowed_coordinates_change_nothing():
    found = lo.data.load("digits-1v7", 15, 15, seed=0)  # 64 features, 30 examples
    wide = lo.models.build("mlp", seed=3, features=64)
    x, val, narrow = problems.narrowed(found.train.x, found.val.x, wide, "mlp")
    assert x.shape == (15, 30)
    results = []
    for model, inputs, queries in ((wide, found.train.x, found.val.x), (narrow, x, val)):
        model.double()
        train = lo.data.Examples(inputs.double(), found.train.y.double(), found.train.ids)
        query = lo.data.Examples(queries.double(), found.val.y.double(), found.val.ids)
        task = lo.Task(model, nn.BCEWithLogitsLoss(), train, l2=0.1)
        with tempfile.TemporaryDirectory() as folder:
            run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.3), 2, 5, 0, Path(folder) / "run")
            methods = [lo.SGDIE(), lo.ACC("free", "outputs"), lo.ACC("exact", "exact"), lo.Replay()]
            results.append([scores.mean() for scores in lo.score(methods, run, task, query)])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-7 * float(a.abs().max()) + 1e-12, rtol=1e-5)


def test_every_cell_has_its_own_file():
    for spec in SPECS.values():
        for quick in (False, True):
            settings = spec.cells(2, quick)
            assert len({spec.file(cell) for cell in settings}) == len(settings)
            assert {cell["seed"] for cell in settings} <= set(range(2))


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    return Shell(tmp_path, monkeypatch, capsys, experiments.entry)


@pytest.mark.full
@REAL
def test_the_command_computes_and_reports(shell, tmp_path):
    done = shell("reproduce", "convex", "--quick", "--seeds", "1", "--out", "results")
    assert done.code == 0, done.err
    assert "14 cells computed" in done.out
    folder = tmp_path / "results" / "convex-quick"
    assert "*paper: SGD-IE*" in (folder / "table.md").read_text()
    frame = pd.read_parquet(folder / "results.parquet")
    assert np.isfinite(frame["rmse"]).all()
    again = shell("reproduce", "convex", "--quick", "--seeds", "1", "--out", "results")
    assert "0 cells computed" in again.out


def test_the_command_says_what_there_is(shell):
    listed = shell("reproduce", "list")
    assert all(name in listed.out for name in SPECS)
    wrong = shell("reproduce", "nothing")
    assert wrong.code == 2
    assert "no experiment 'nothing'" in wrong.err
    assert "did you mean labels?" in shell("reproduce", "labls").refusal
    empty = shell("reproduce", "convex", "--report-only")
    assert empty.code == 1
    assert "no finished cell" in empty.refusal
