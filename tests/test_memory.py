"""Peak memory stays within the budget, for every estimator: one process measures them all."""

import gc
import json
import subprocess
import sys
from functools import partial

import pytest
import torch

import leaveout as lo
from leaveout.compute.resources import BESIDE
from leaveout.task.footprint import activation_bytes
from problems import shared, with_least_memory

BUDGET = 20_000_000

SCRIPT = """
import ctypes, gc, json, re, sys, warnings
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import leaveout as lo
from leaveout.compute.cost import _peak, _reset_peak

warnings.simplefilter("ignore")
torch.manual_seed(0)
x, y = torch.randn(100, 500), torch.randint(50, (100,))
runs = {}
for name, kind, options in (("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.5}), ("adam", torch.optim.Adam, {})):
    model = nn.Linear(500, 50)
    task = lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(x, y))
    runs[name] = lo.train(task, kind(model.parameters(), **options), 1, 50, 0, f"{sys.argv[1]}/{name}"), task
rows, labels = torch.randn(20000, 4), torch.randint(20, (20000,))  # here it is the rows that are many
for name, batch in (("rows", 2000), ("large", 10000)):  # and their batches are large
    model = nn.Linear(4, 20)
    task = lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(rows, labels))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    runs[name] = lo.train(task, optimizer, 1, batch, 0, f"{sys.argv[1]}/{name}"), task
def queries(count, place):
    width, classes = (4, 20) if place in ("rows", "large") else (500, 50)
    return TensorDataset(torch.randn(count, width), torch.randint(classes, (count,)))
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
estimators = [
    lo.SGDIE(), lo.SGDIE(direction="forward"), lo.SGDIE(readout="exact"), lo.TracIn(), lo.TracIn("epochs"),
    lo.TracIn(learning_rate=False), lo.ACC("free"), lo.ACC("free", direction="backward"), lo.ACC(lo.Subspace(4)),
    lo.ACC("exact"), lo.DVEmb(), lo.DVEmb("fisher", project=64), lo.DVEmb(acc=True),
    lo.InfluenceFunction(damping=1.0), lo.Replay(), lo.AdamIE(), lo.AdamIE(True),
]
adam = [lo.SGDIE(), lo.ACC("exact"), lo.ACC("jump"), lo.Replay(), lo.AdamIE(), lo.AdamIE(True)]
outputs = [
    lo.SGDIE(readout="outputs"), lo.SGDIE(readout="outputs", direction="forward"), lo.TracIn(readout="outputs"),
    lo.ACC("free", readout="outputs"), lo.ACC(lo.Subspace(16), readout="outputs"), lo.ACC("exact", readout="outputs"),
    lo.DVEmb(readout="outputs"), lo.InfluenceFunction(damping=1.0, readout="outputs"),
]
cases = [("sgd", one, kind) for one in estimators[:-2] for kind in ("mean", "each")]
cases += [("sgd", one, "self") for one in (lo.SGDIE(), lo.ACC("exact"), lo.InfluenceFunction(damping=1.0), lo.Replay())]
cases += [("adam", one, kind) for one in adam for kind in ("mean", "each")]
cases += [("sgd", one, kind) for one in outputs for kind in ("mean", "each")]
cases += [("adam", one, "each") for one in (lo.SGDIE(readout="outputs"), lo.ACC("jump", readout="outputs"))]
cases += [(place, "timeline", "mean") for place in runs]
cases += [("rows", one, "mean") for one in (lo.SGDIE(readout="outputs"), lo.TracIn(readout="outputs"))]
cases += [("large", lo.SGDIE(readout="outputs"), "mean"), ("large", lo.SGDIE(direction="forward"), "some")]
cases += [("large", lo.ACC("exact"), "some"), ("large", lo.Replay(range(40)), "mean")]
cases += [("sgd", one, "groups") for one in (lo.SGDIE(), lo.ACC("free"), lo.ACC("exact"), lo.Replay())]
for place, one, kind in cases:
    run, task = runs[place]
    alone = isinstance(one, lo.ACC) and one.direction == "backward"
    count = 6 if alone else 4 if getattr(one, "readout", "") == "outputs" else 120
    count = 60 if place in ("rows", "large") else min(count, 2) if one == outputs[4] else count
    def ask(count, resources):
        if one == "timeline":
            return lo.timeline(run, task, queries(count, place), resources=resources)
        if kind == "self":
            return one.self_influence(run, task, ids=range(min(count, 100)), resources=resources)
        groups = [list(range(i, i + 40)) for i in range(60)] if kind == "groups" else None
        how, ids = "mean" if kind in ("mean", "some") else "each", range(10 * count) if kind == "some" else None
        return one.score(run, task, queries(count, place), queries=how, ids=ids, groups=groups, resources=resources)
    ask(2, lo.Resources("8GB"))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident()
    _reset_peak(None)
    ask(count, lo.Resources(int(sys.argv[2])))
    print(json.dumps([place, getattr(one, "name", one), kind, _peak(None) - before]), flush=True)
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of a block is only known on Linux")
def test_the_peak_keeps_to_the_budget(tmp_path):
    """120 query vectors alone are 12 MB, and each is held about ten times over; so are 100 rows.

    Of the run with many rows, all inner products with the 1,200 outputs would be 96 MB. Where batches are large, each
    row's weights of their examples are 40 kB, and the outputs of a batch 800 kB.
    """
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(BUDGET)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(measured) == 15 * 2 + 4 + 6 * 2 + 4 + 8 * 2 + 2 + 4 + 2 + 4
    assert [case for case in measured if case[-1] > BUDGET + BESIDE] == []


OUTPUTS = {"readout": "outputs"}
BUDGETED = {
    "momentum": [
        lo.SGDIE(),
        lo.SGDIE(**OUTPUTS),
        lo.SGDIE(**OUTPUTS, direction="forward"),
        lo.TracIn(**OUTPUTS),
        lo.ACC("free", **OUTPUTS),
        lo.ACC("exact", **OUTPUTS),
        lo.DVEmb(**OUTPUTS),
        lo.InfluenceFunction(damping=1.0, **OUTPUTS),
    ],
    "one group": [lo.ACC(lo.Subspace(3)), lo.ACC(lo.Subspace(3), **OUTPUTS)],
    "adam": [lo.SGDIE(**OUTPUTS), lo.ACC("jump"), lo.ACC("jump", **OUTPUTS)],
}


def one_group(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("queries", ["mean", "each"])
@pytest.mark.parametrize("optimizer", BUDGETED)
def test_the_least_budget_changes_no_score(optimizer, queries):
    """With the least that is not refused, vectors go one by one, and the outputs of a query in parts."""
    made = one_group if optimizer == "one group" else optimizer
    problem = shared("mlp", made, batches=[[0, 1, 2], [3, 4, 5], [2, 0, 4]])
    for estimator in BUDGETED[optimizer]:
        ask = partial(estimator.score, problem.run, problem.task, problem.query, queries=queries)
        tight = with_least_memory(lambda resources, ask=ask: ask(resources=resources)).values
        torch.testing.assert_close(tight, ask().values, rtol=1e-9, atol=1e-14, msg=estimator.name)


def test_the_least_budget_changes_no_timeline():
    problem = shared("mlp", "momentum", batches=[[0, 1, 2], [3, 4, 5], [2, 0, 4]])
    ask = partial(lo.timeline, problem.run, problem.task, problem.query)
    tight = with_least_memory(lambda resources: ask(resources=resources)).values
    torch.testing.assert_close(tight, ask().values, rtol=1e-9, atol=1e-14)


def test_measuring_a_forward_pass_leaves_nothing_behind():
    problem = shared("mlp", "momentum", batches=[[0, 1, 2], [3, 4, 5], [2, 0, 4]])
    params, batch = problem.run.final()["param"], problem.task.read([0, 1, 2])

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    assert activation_bytes(problem.task.objective, params, batch) > 0
    before = alive()
    for _ in range(5):
        activation_bytes(problem.task.objective, params, batch)
    assert alive() == before
