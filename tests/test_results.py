"""Results beside a run: one writer each, in another place where asked for, and never those of another run."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

import leaveout as lo
from commands import Shell, started
from leaveout._util.files import unsealed, write_json
from leaveout.builtin import config
from leaveout.builtin.config import Config, DataPart, ModelPart, OptimizerPart, TrainPart
from leaveout.run.manifest import MANIFEST
from refusal import refused


def trained(path: Path, seed: int) -> Path:
    parts = DataPart("digits", 60, 30, flip=0.1), ModelPart("mlp", hidden=[6], activation="tanh")
    how = TrainPart(epochs=3, batch_size=20, seed=seed)
    config.run_config(Config(*parts, OptimizerPart(lr=0.5), how), path)
    return path


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Path:
    """Two runs that differ by the order of their batches."""
    folder = tmp_path_factory.mktemp("both")
    for seed, name in enumerate("xy"):
        trained(folder / name, seed)
    return folder


@pytest.fixture
def shell(both, tmp_path, monkeypatch, capsys) -> Shell:
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(both, tmp_path / "runs")
    return Shell(tmp_path, monkeypatch, capsys)


def test_results_of_another_run_are_damage(shell):
    for name in ("x", "y"):
        assert shell("score", f"runs/{name}", "--method", "sgd-ie").code == 0
        assert shell("verify", f"runs/{name}", "--replays", "10").code == 0
        assert shell("cleanse", f"runs/{name}", "--remove", "2", "--random", "1").code == 0
    assert shell("show", "runs/x", "--check").code == 0
    files = ["checks/sgd-ie.json", "cleanse.json", "scores/sgd-ie.safetensors"]
    for copied, words in zip(
        files, ("The check is of other scores", "The cleansing curve is of", "are of"), strict=True
    ):
        shutil.copytree(shell.folder / "runs/x", shell.folder / "runs/z")
        shutil.copy(shell.folder / "runs/y" / copied, shell.folder / "runs/z" / copied)
        done = shell("show", "runs/z", "--check", "--json")
        damage = json.loads(done.out)["damage"]
        assert done.code == 1
        assert any(copied in sentence and words in sentence for sentence in damage), damage
        done = shell("show", "runs/z")
        assert (done.code, words in done.words) == (0, True)
        shutil.rmtree(shell.folder / "runs/z")
    # Also where the scores that it is of are not there.
    shutil.rmtree(shell.folder / "runs/x/scores")
    shutil.copy(shell.folder / "runs/y/checks/sgd-ie.json", shell.folder / "runs/x/checks/sgd-ie.json")
    done = shell("show", "runs/x", "--check")
    assert (done.code, done.error) == (1, "check-of-another-run")
    assert "The check of SGD-IE is of another run" in done.refusal


def test_the_second_of_two_commands_is_told_before_it_works(shell):
    first = started("score", "runs/x", "--method", "replay", cwd=shell.folder)
    lock = shell.folder / "runs/x/scores/.replay.safetensors.lock/.lock"
    try:
        patience = time.monotonic() + 60
        while not lock.exists():
            assert first.poll() is None, first.communicate()
            assert time.monotonic() < patience
            time.sleep(0.005)
        first.send_signal(signal.SIGSTOP)
        done = shell("score", "runs/x", "--method", "sgd-ie", "--method", "replay")
        assert done.code == 1
        assert f"is being written by another leaveout command (process {first.pid})" in done.refusal
        assert "wait until that has ended" in done.refusal
        assert not list((shell.folder / "runs/x/scores").glob("*.safetensors"))  # its first method was not begun
        assert shell("score", "runs/x", "--method", "sgd-ie").code == 0  # what nobody else writes
    finally:
        first.send_signal(signal.SIGCONT)
        _, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert not lock.parent.exists()


def test_a_run_that_cannot_be_written_has_its_results_elsewhere(shell):
    (shell.folder / "runs/x/scores").write_text("in the way, also of those who may write everywhere")
    done = shell("score", "runs/x")
    assert done.code == 1
    assert "--results DIRECTORY" in done.refusal
    before = sorted((shell.folder / "runs/x").iterdir())
    for command in (
        ("score", "--method", "acc"),
        ("verify", "--replays", "10"),
        ("cleanse", "--remove", "2", "--random", "1"),
        ("report",),
    ):
        done = shell(command[0], "runs/x", *command[1:], "--results", "mine")
        assert done.code == 0, done.err
    assert sorted((shell.folder / "runs/x").iterdir()) == before
    files = {str(file.relative_to("mine")) for file in Path("mine").rglob("*") if file.is_file()}
    assert files == {"scores/acc-free.safetensors", "checks/acc-free.json", "cleanse.json", "report.html"}
    assert shell("show", "runs/x", "--results", "mine", "--json").told["scores"][0]["method"] == "ACC(free)"


def test_a_manifest_that_repeats_a_shard_is_refused_before_a_shard_is_read(shell):
    file = shell.folder / "runs/x" / MANIFEST
    told = unsealed(json.loads(file.read_text()))
    write_json(file, {**told, "shards": told["shards"] * 200_000})
    for shard in file.parent.glob("shard-*"):
        shard.unlink()
    done = shell("show", "runs/x", "--check")
    assert (done.code, "named twice" in done.refusal) == (1, True)
    with file.open("ab") as opened:
        opened.truncate(10**9)  # sparse: nothing is written
    with refused(lo.RunError, "manifest-unreadable", "100,000,000 bytes"):
        lo.open_run(file.parent)


def test_configs_are_bounded(shell):
    Path("deep.toml").write_text(f"[model]\nhidden = {[4] * 3000}\n")
    done = shell("train", "--config", "deep.toml", "--out", "runs/deep")
    assert (done.code, "hidden has 3,000 layers: give at most 100" in done.refusal) == (1, True)
    Path("long.toml").write_text("# " + "x" * 1_000_001)
    done = shell("train", "--config", "long.toml", "--out", "runs/long")
    assert (done.code, "has more than 1,000,000 bytes" in done.refusal) == (1, True)
