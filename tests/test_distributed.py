"""DistributedDataParallel in two real processes: the first records, and replays are the training of both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import leaveout as lo
import two_processes

SCRIPT = Path(two_processes.__file__)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    working = [subprocess.Popen([sys.executable, str(SCRIPT), str(rank), str(folder)]) for rank in (0, 1)]
    assert [one.wait(timeout=300) for one in working] == [0, 0]
    return lo.open_run(folder / "run"), [torch.load(folder / f"trained-{rank}.pt") for rank in (0, 1)]


def task() -> lo.Task:
    return lo.Task(
        two_processes.net(),
        nn.CrossEntropyLoss(),
        two_processes.data(),
        forward=lambda model, batch: (model(batch[0]), batch[1]),
    )


def query_loss(weights) -> float:
    model = two_processes.net().eval()
    model.load_state_dict(weights)
    x, y, _ = two_processes.data().tensors
    with torch.no_grad():
        return float(F.cross_entropy(model(x), y))


def test_recording_changes_no_bit(trained) -> None:
    _, weights = trained
    for one in weights:
        assert all(torch.equal(one["recorded"][key], value) for key, value in weights[0]["-1"].items())


def test_what_the_other_processes_know_alone_is_refused_in_each_of_them(trained) -> None:
    _, weights = trained
    for one in weights:
        code, words = one["refused"]["BatchNorm"]
        assert (code, "'1.running_mean'" in words) == ("distributed-buffers", True)
        assert one["refused"]["resume"][0] == "distributed-not-resumed"
        code, words = one["refused"]["SyncBatchNorm"]
        assert (code, "SyncBatchNorm" in words) == ("model-not-supported", True)


def test_the_batches_of_both_processes_are_one_step(trained) -> None:
    run, _ = trained
    assert [len(run.record(i).parts) for i in range(len(run))] == [2] * 8
    assert sorted(set(torch.cat([run.record(i).ids for i in range(4)]).tolist())) == list(range(22))


def test_replay_is_training_in_two_processes_without_the_example(trained) -> None:
    run, weights = trained
    ids = list(two_processes.LEFT_OUT[1:])
    scores = lo.Replay().score(run, task(), two_processes.data(), ids=ids).values.flatten()
    base = query_loss(weights[0]["-1"])
    truth = [query_loss(weights[0][str(k)]) - base for k in ids]
    assert scores.tolist() == pytest.approx(truth, rel=1e-9)


def test_every_step_is_proven_and_scored(trained) -> None:
    run, _ = trained
    scores = lo.SGDIE().score(run, task(), two_processes.data())
    assert float(scores.values.abs().max()) > 0
