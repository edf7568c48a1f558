"""The long MNIST run, on a few images of noise: what it writes, and that it goes on where it was."""

import json

import pytest
import torch

import leaveout as lo
from commands import Shell
from experiments import __main__ as experiments
from experiments.bench import mnist
from leaveout.builtin.data import Data, Examples
from leaveout.estimators import replay

ASKED = ["--images", "40", "--flipped", "0.1", "--replays", "8", "--out", "out", "--work", "work"]


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    def drawn(name: str, n_train: int, n_val: int) -> Data:
        assert (name, n_val) == ("mnist", 10_000)
        generator = torch.Generator().manual_seed(0)
        x, y = torch.rand(n_train + 40, 1, 28, 28, generator=generator), torch.arange(n_train + 40) % 10
        x[:, 0, 0] = y[:, None] / 10
        parts = (torch.arange(n_train), torch.arange(n_train, n_train + 20), torch.arange(n_train + 20, n_train + 40))
        return Data(name, *(Examples(x[ids], y[ids], ids) for ids in parts), (), ())

    monkeypatch.setattr(mnist.data, "load", drawn)
    monkeypatch.setattr(mnist, "EPOCHS", 2)
    monkeypatch.setattr(mnist, "SHEET", 10)
    return Shell(tmp_path, monkeypatch, capsys, experiments.entry)


def test_a_check_with_moved_starts_stands_beside_the_one_without(shell, monkeypatch):
    file = shell.folder / "out" / "mnist-40-flipped.json"
    assert shell("mnist", *ASKED).code == 0
    plain = json.loads(file.read_text())
    assert (plain["images"], plain["flipped"], plain["steps"]) == (40, 4, 2)
    assert "verify with moves" not in plain
    assert all(set(row) == {"train", "score", "truth", "sample"} for row in plain["verify"]["replays"])

    done = shell("mnist", *ASKED, "--moves", "1")
    assert done.code == 0
    both = json.loads(file.read_text())
    assert {key: value for key, value in both.items() if key != "verify with moves"} == plain
    moved = both["verify with moves"]
    assert moved["ceiling"]["moves"] == 1
    assert "from 2 starts 0.001 apart" in moved["sentence"]
    assert " ".join(moved["sentence"].split()) in done.words

    noisy = mnist.data.flip(mnist.data.load("mnist", 40, 10_000).train, 0.1, seed=0)
    task = lo.Task(lo.models.build("mnist-cnn", seed=0), torch.nn.CrossEntropyLoss(), noisy.examples)
    run, val = lo.open_run(shell.folder / "work" / "run"), mnist.data.load("mnist", 40, 10_000).val
    rows = [row["train"] for row in moved["replays"]]
    truth = lo.Replay(move=1).score(run, task, val, ids=rows).mean().tolist()
    assert [row["move 1"] for row in moved["replays"]] == pytest.approx(truth, abs=1e-6)
    assert [row["truth"] for row in moved["replays"]] == [row["truth"] for row in plain["verify"]["replays"]]

    def twice(*_: object, **__: object) -> None:
        raise AssertionError("replayed what is on disk")

    monkeypatch.setattr(replay, "counterfactuals", twice)
    assert shell("mnist", *ASKED, "--moves", "1", "--no-groups").code == 0
    assert json.loads(file.read_text())["verify with moves"]["ceiling"] == {**moved["ceiling"], "groups": {}}
    assert shell("mnist", *ASKED, "--moves", "1").code == 0
    assert json.loads(file.read_text())["verify with moves"]["replays"] == moved["replays"]
