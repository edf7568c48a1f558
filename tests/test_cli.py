"""The commands, run as a user runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

from leaveout.cli.demo import free

MADE = """
import torch
from torch import nn
from leaveout import Task
from leaveout.builtin import data

def make_task():
    digits = data.load("digits", n_train=300, n_val=50)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    return Task(model, nn.CrossEntropyLoss(), digits.train), digits.val
"""


def leaveout(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from leaveout.cli import entry; entry()", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_demo_finds_most_flipped_labels_and_keeps_its_run(tmp_path):
    done = leaveout("demo", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "The 15 most harmful examples" in words
    for method in ("SGD-IE(exact readout)", "ACC(exact, exact readout)"):
        found = int(words.split(f"{method}: ")[1].split()[0])
        assert found >= 35, words
        assert f"{method}, compared with 64 exact replays" in words
    assert (tmp_path / "run" / "manifest.json").exists()
    assert "The report, with pictures: run/report.html" in words
    assert "Digits, a tenth of the labels flipped" in (tmp_path / "run" / "report.html").read_text()
    assert len(list((tmp_path / "run" / "scores").iterdir())) == len(list((tmp_path / "run" / "checks").iterdir())) == 2
    assert (tmp_path / "run" / "cleanse.json").exists()
    once_more = leaveout("report", "run", "--out", "again.html", cwd=tmp_path)  # the config beside it is enough
    assert once_more.returncode == 0, once_more.stderr
    assert (tmp_path / "again.html").read_text().count("data:image/png") > 100
    again = leaveout("demo", "--out", "run", cwd=tmp_path)
    assert again.returncode == 1
    assert "already holds a run" in " ".join(again.stderr.split())
    assert "Traceback" not in again.stderr


def test_demo_takes_a_directory_that_is_free(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for expected in ("leaveout-demo", "leaveout-demo-2", "leaveout-demo-3"):
        assert str(free("leaveout-demo")) == expected
        (tmp_path / expected).mkdir()


def test_plan_of_a_run_that_is_not_there_yet(tmp_path):
    (tmp_path / "mine.py").write_text(MADE)
    done = leaveout("plan", "--task", "mine:make_task", "--epochs", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for method in ("training, recorded", "TracIn", "SGD-IE", "ACC(free)", "ACC(exact)", "Replay"):
        assert method in done.stdout


@pytest.mark.parametrize("where", ["nowhere:make_task", "mine:nothing", "mine:MADE"])
def test_a_task_that_cannot_be_made_is_refused(tmp_path, where):
    (tmp_path / "mine.py").write_text("MADE = 3")
    done = leaveout("plan", "--task", where, cwd=tmp_path)
    assert done.returncode == 2
    assert where in done.stderr
