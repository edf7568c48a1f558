"""What a killed command leaves beside its results is gone after the next one; what a running one holds stays."""

import subprocess
import sys
from pathlib import Path

import pytest

from commands import SMALL, Shell
from leaveout._util.leftovers import place_of_lock, tidy
from leaveout._util.lock import LOCK
from leaveout.run.recording.overwrite import clear

COMMANDS = {
    "scores/sgd-ie.safetensors": ("score", "runs/x", "--method", "sgd-ie"),
    "checks/sgd-ie.json": ("verify", "runs/x", "--replays", "12"),
    "labels.json": ("labels", "runs/x"),
    "cleanse.json": ("cleanse", "runs/x", "--remove", "3", "--random", "1"),
    "scores/sgd-ie-replay.safetensors": ("refine", "runs/x", "--method", "sgd-ie", "--top", "4"),
    "training.json": ("train", *SMALL, "--out", "runs/x"),
}

HOLD = """
import os, sys
from pathlib import Path
from leaveout._util.lock import Lock
place = Path(sys.argv[1])
place.mkdir()
lock = Lock(place)
(place.parent / sys.argv[2]).write_text("half of it")
if sys.argv[3] == "die":
    os._exit(9)
print("held", flush=True)
sys.stdin.read()
"""


def holder(file: Path, then: str) -> subprocess.Popen:
    """A process that writes this file, and is half done."""
    given = [sys.executable, "-c", HOLD, str(place_of_lock(file)), f".{file.name}.0a1b2c3d", then]
    return subprocess.Popen(given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys) -> Shell:
    monkeypatch.setenv("COLUMNS", "200")
    shell = Shell(tmp_path, monkeypatch, capsys)
    assert shell("train", *SMALL, "--out", "runs/x").code == 0
    return shell


def hidden(run: Path) -> list[str]:
    return sorted(file.name for file in run.rglob(".*"))


def test_commands_that_find_their_answer_tidy_up(shell):
    run = Path("runs/x")
    for name, command in COMMANDS.items():
        assert shell(*command).code == 0
        assert holder(run / name, "die").wait() == 9
        assert len(hidden(run)) == 3  # the lock, its directory, and what was not renamed
        assert shell(*command).code == 0
        assert hidden(run) == [], name


def test_a_training_that_was_killed_before_its_result_was_stored_stores_it(shell):
    run = Path("runs/x")
    before = (run / "training.json").read_text()
    (run / "training.json").unlink()
    (run / LOCK).write_text("1")  # of the training, which had written its last step
    assert shell("train", *SMALL, "--out", "runs/x").code == 0
    assert (run / "training.json").read_text() == before
    assert hidden(run) == []


def test_what_a_running_command_holds_stays(tmp_path):
    file = tmp_path / "cleanse.json"
    process = holder(file, "wait")
    assert process.stdout.readline() == "held\n"
    before = hidden(tmp_path)
    tidy([file])
    assert hidden(tmp_path) == before
    process.communicate()
    tidy([file])
    assert hidden(tmp_path) == []


def test_a_run_with_leftovers_can_be_recorded_again(shell):
    run = Path("runs/x")
    for name in ("cleanse.json", "scores/acc.safetensors"):
        (run / name).parent.mkdir(exist_ok=True)
        assert holder(run / name, "die").wait() == 9
    (run / ".report.html.0a1b2c3d").write_text("half of it")
    clear(run)
    assert not list(run.iterdir())


def test_leftovers_of_others_stay(tmp_path):
    file = tmp_path / "cleanse.json"
    assert holder(file, "die").wait() == 9
    (tmp_path / ".cleanse.json.mine").write_text("not ours")
    tidy([file, tmp_path / "another.json"])
    assert hidden(tmp_path) == [".cleanse.json.mine"]
