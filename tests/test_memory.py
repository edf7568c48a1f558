"""Peak memory stays within the budget, plus what the process and the run itself need."""

import subprocess
import sys

import pytest

CONSTANT = 400_000_000
"""What scoring may need beside its budget: code, traces, one shard of the run, one batch's activations."""

SCRIPT = """
import resource, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import leaveout as lo
from leaveout.compute.cost import _peak

method, memory, folder = sys.argv[1:]
torch.manual_seed(0)
x = torch.randn(1200, 300)
model = nn.Sequential(nn.Linear(300, 64), nn.Tanh(), nn.Linear(64, 2))
task = lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(x, (x[:, 0] > 0).long()))
run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), 1, 200, 0, folder + "/run")
estimator = {"exact": lo.ACC("exact"), "replay": lo.Replay(), "free": lo.ACC(), "outputs": lo.ACC(readout="outputs")}
query = TensorDataset(x[:20], (x[:20, 0] > 0).long())
before = _peak()
scores = estimator[method].score(run, task, query, resources=lo.Resources(memory))
print(before, scores.cost.peak_memory, float(scores.values.abs().sum()))
"""


def measured(method: str, memory: str, folder) -> tuple[int, float]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, method, memory, str(folder)], capture_output=True, text=True, check=True
    )
    before, peak, total = done.stdout.split()
    return int(peak) - int(before), float(total)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of a block is only known on Linux")
@pytest.mark.parametrize("method", ["exact", "replay", "free", "outputs"])
def test_the_peak_keeps_to_the_budget(tmp_path, method):
    """Unbounded, the rows alone (1,200 times 19,394 parameters and as many buffers) take 186 MB, products far more."""
    (tmp_path / "tight").mkdir()
    (tmp_path / "roomy").mkdir()
    tight, total = measured(method, "100MB", tmp_path / "tight")
    roomy, expected = measured(method, "8GB", tmp_path / "roomy")
    assert tight <= 100_000_000 + CONSTANT
    assert total == pytest.approx(expected, rel=1e-3)
    if method in ("exact", "replay"):
        assert tight < roomy, "the budget should have made a difference"
