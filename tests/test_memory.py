"""Peak memory stays within the budget, for every estimator: one process measures them all."""

import json
import subprocess
import sys

import pytest

from leaveout.compute.resources import BESIDE

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
def queries(count):
    return TensorDataset(torch.randn(count, 500), torch.randint(50, (count,)))
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
estimators = [
    lo.SGDIE(), lo.SGDIE(direction="forward"), lo.SGDIE(readout="exact"), lo.TracIn(), lo.TracIn("epochs"),
    lo.TracIn(learning_rate=False), lo.ACC("free"), lo.ACC("free", direction="backward"), lo.ACC(lo.Subspace(4)),
    lo.ACC("exact"), lo.DVEmb(), lo.DVEmb("fisher", project=64), lo.DVEmb(acc=True),
    lo.InfluenceFunction(damping=1.0), lo.Replay(), lo.AdamIE(), lo.AdamIE(True),
]
adam = [lo.SGDIE(), lo.ACC("exact"), lo.Replay(), lo.AdamIE(), lo.AdamIE(True)]
cases = [("sgd", one, kind) for one in estimators[:-2] for kind in ("mean", "each")]
cases += [("sgd", one, "self") for one in (lo.SGDIE(), lo.ACC("exact"), lo.InfluenceFunction(damping=1.0), lo.Replay())]
cases += [("adam", one, kind) for one in adam for kind in ("mean", "each")]
cases += [("sgd", one, "groups") for one in (lo.SGDIE(), lo.ACC("free"), lo.ACC("exact"), lo.Replay())]
for place, one, kind in cases:
    run, task = runs[place]
    count = 6 if one.name.startswith("ACC") and getattr(one, "direction", "") == "backward" else 120
    def ask(count, resources):
        if kind == "self":
            return one.self_influence(run, task, ids=range(min(count, 100)), resources=resources)
        groups = [list(range(i, i + 40)) for i in range(60)] if kind == "groups" else None
        how = "mean" if kind == "mean" else "each"
        return one.score(run, task, queries(count), queries=how, groups=groups, resources=resources)
    ask(2, lo.Resources("8GB"))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident()
    _reset_peak()
    ask(count, lo.Resources(int(sys.argv[2])))
    print(json.dumps([place, one.name, kind, _peak() - before]), flush=True)
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of a block is only known on Linux")
def test_the_peak_keeps_to_the_budget(tmp_path):
    """120 query vectors alone are 12 MB, and each is held about ten times over; so are 100 rows."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(BUDGET)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(measured) == 15 * 2 + 4 + 5 * 2 + 4
    assert [case for case in measured if case[-1] > BUDGET + BESIDE] == []
