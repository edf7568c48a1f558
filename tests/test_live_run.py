"""A run that is being recorded, and a disk that is full when its lock is taken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import leaveout as lo
from leaveout._util.lock import LOCK, Lock, has_writer
from leaveout.run.manifest import read_manifest, write_manifest
from refusal import refused


def recorder_of(path: Path) -> tuple[lo.Recorder, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lo.Recorder(path, model, optimizer), optimizer, model


def steps(recorder: lo.Recorder, optimizer: torch.optim.Optimizer, model: nn.Module, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        recorder.step([0, 1])
        optimizer.step()


def test_a_shard_that_the_manifest_is_about_to_name_is_not_called_superfluous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leaveout.run.recording.writer.SHARD_STEPS", 4)
    path = tmp_path / "run"
    recorder, optimizer, model = recorder_of(path)
    steps(recorder, optimizer, model, 10)
    recorder._writer._wait()
    named = read_manifest(path)
    assert len(named.shards) == 2
    # As it is between the writing of a shard and that of the manifest.
    write_manifest(path, named.__class__(**{**vars(named), "shards": named.shards[:1]}))
    assert has_writer(path)
    assert lo.check_run(path) == []
    recorder._release()
    recorder._writer.abandon()  # as if it had died here
    assert not has_writer(path)
    assert [problem for problem in lo.check_run(path) if "belongs to no recorded step" in problem]


def test_a_look_at_the_lock_takes_nothing_from_its_writer(tmp_path: Path) -> None:
    assert not has_writer(tmp_path)
    lock = Lock(tmp_path)
    assert has_writer(tmp_path)
    assert has_writer(tmp_path)
    with refused(lo.RunError, "directory-busy"):
        Lock(tmp_path)
    lock.release()
    assert not has_writer(tmp_path)
    (tmp_path / LOCK).touch()  # left by a process that was killed
    assert not has_writer(tmp_path)
    Lock(tmp_path).release()


FULL = """
import json, resource, signal, sys
from pathlib import Path
import torch
from torch import nn
import leaveout as lo
torch.set_num_threads(1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path, model = Path(sys.argv[1]), nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
try:
    lo.Recorder(path, model, optimizer)
    first = ""
except lo.RunError as error:
    first = str(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
with lo.Recorder(path, model, optimizer) as recorder:
    recorder.step([0])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    run = recorder.finish()
print(json.dumps({"first": first, "steps": len(run)}))
"""


def test_a_disk_that_is_full_when_the_lock_is_taken(tmp_path: Path) -> None:
    """A process that may not write meets the same refusal as one on a full disk."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path / "run")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "make room" in told["first"]
    assert told["steps"] == 1
