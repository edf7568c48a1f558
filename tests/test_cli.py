"""The demo and the plan, run as a user runs them."""

import re
import sys

import pytest

from commands import Shell
from leaveout.cli.demo import free

MADE = """
import torch
from torch import nn
from leaveout import Task
from leaveout.builtin import data

def make_task():
    digits = data.load("digits", n_train=60, n_val=20)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    return Task(model, nn.CrossEntropyLoss(), digits.train), digits.val
"""


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Shell(tmp_path, monkeypatch, capsys)
    sys.modules.pop("mine", None)


def test_demo_finds_most_flipped_labels_and_keeps_its_run(shell, tmp_path):
    done = shell("demo", "--out", "run")
    assert done.code == 0, done.err
    assert "The 15 most harmful examples" in done.words
    for method in ("SGD-IE(exact readout)", "ACC(exact, exact readout)"):
        found = int(done.words.split(f"{method}: ")[1].split()[0])
        assert found >= 35, done.words
        assert f"{method}, compared with 64 exact replays" in done.words
    assert (tmp_path / "run" / "manifest.json").exists()
    assert "The report, with pictures: run/report.html" in done.words
    assert "Digits, a tenth of the labels flipped" in (tmp_path / "run" / "report.html").read_text()
    assert len(list((tmp_path / "run" / "scores").iterdir())) == len(list((tmp_path / "run" / "checks").iterdir())) == 2
    assert (tmp_path / "run" / "cleanse.json").exists()
    once_more = shell("report", "run", "--out", "again.html")  # the config beside it is enough
    assert once_more.code == 0, once_more.err
    assert (tmp_path / "again.html").read_text().count("data:image/png") > 100
    again = shell("demo", "--out", "run")
    assert again.code == 1
    assert "already holds a run" in again.refusal


def test_demo_takes_a_directory_that_is_free(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for expected in ("leaveout-demo", "leaveout-demo-2", "leaveout-demo-3"):
        assert str(free("leaveout-demo")) == expected
        (tmp_path / expected).mkdir()


@pytest.mark.full
def test_plan_of_a_run_that_is_not_there_yet(shell, tmp_path):
    (tmp_path / "mine.py").write_text(MADE)
    done = shell("plan", "--task", "mine:make_task", "--epochs", "3")
    assert done.code == 0, done.err
    for method in ("training, recorded", "TracIn", "SGD-IE", "ACC(free)", "ACC(exact)", "Replay"):
        assert method in done.out


@pytest.mark.parametrize("where", ["nowhere:make_task", "mine:nothing", "mine:MADE"])
def test_a_task_that_cannot_be_made_is_refused(shell, tmp_path, where):
    (tmp_path / "mine.py").write_text("MADE = 3")
    done = shell("plan", "--task", where)
    assert done.code == 2
    assert where in done.refusal


def test_data_sets_are_listed_and_fetched(shell, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    listed = shell("data", "list")
    assert listed.code == 0
    assert re.search(r"digits\s+│\s+1,000\s+│\s+400\s+│\s+found", listed.out)
    fetched = shell("data", "fetch", "digits")
    assert "digits: 1,000 training, 400 validation, 397 test" in fetched.out
    wrong = shell("data", "fetch", "digitz")
    assert wrong.code == 2
    assert "there is no data set 'digitz'" in wrong.refusal
