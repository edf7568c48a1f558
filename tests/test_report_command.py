"""leaveout report as a user meets it."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import leaveout as lo
from commands import OWN, SMALL, Shell

PICTURE = """
def picture(example):
    return f"a row that starts with {float(example[0][0]):.2f}"
"""


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys) -> Shell:
    monkeypatch.setenv("COLUMNS", "200")
    return Shell(tmp_path, monkeypatch, capsys)


def data(path: Path) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())[1])


def test_report_of_a_built_in_run(shell):
    assert shell("train", *SMALL, "--flip", "0.1", "--out", "runs/x").code == 0
    refused = shell("report", "runs/x")
    assert refused.code == 1
    assert "has no scores yet: run leaveout score runs/x first" in refused.refusal
    assert shell("score", "runs/x", "--method", "sgd-ie", "--queries", "each").code == 0
    done = shell("report", "runs/x")
    assert done.code == 0, done.err
    assert "runs/x/report.html" in done.words
    assert "not verified: leaveout verify runs/x" in done.words
    first = data(Path("runs/x/report.html"))
    assert first["methods"][0]["trust"]["level"] == "unchecked"
    assert len(first["queries"]) == 30
    assert all(shown["picture"] for shown in first["shown"].values()), "pixels are shown as pictures"
    assert shell("score", "runs/x", "--method", "acc").code == 0
    assert shell("verify", "runs/x", "--method", "acc", "--replays", "8").code == 0
    before = Path("runs/x/report.html").read_bytes()
    assert shell("report", "runs/x").code == 1, "something is new"
    refused = shell("report", "runs/x")
    assert refused.code == 1
    assert "exists already: give --again to replace it" in refused.refusal
    assert Path("runs/x/report.html").read_bytes() == before
    told = shell("report", "runs/x", "--again", "--json").told
    assert told == {"run": "runs/x", "report": "runs/x/report.html", "method": "ACC(free)", "checked": True}
    assert data(Path("runs/x/report.html"))["methods"][0]["check"]["points"]
    made = Path("runs/x/report.html").stat().st_mtime_ns
    assert shell("report", "runs/x", "--json").told == told, "the same again is answered from disk"
    assert Path("runs/x/report.html").stat().st_mtime_ns == made
    assert shell("score", "runs/x", "--method", "replay").code == 0
    assert shell("report", "runs/x", "--again", "--json").told["method"] == "Replay", "exact scores come first"
    page = data(Path("runs/x/report.html"))
    assert [one["name"] for one in page["methods"]] == ["Replay", "SGD-IE", "ACC(free)"]
    other = shell("report", "runs/x", "--method", "sgd-ie-each", "--out", "deep/other.html", "--json").told
    assert (other["method"], other["checked"]) == ("SGD-IE", False)
    assert Path("deep/other.html").exists()


def test_report_of_a_run_of_ones_own(shell, monkeypatch):
    Path("mine.py").write_text(OWN + PICTURE)
    monkeypatch.syspath_prepend(str(shell.folder))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    import mine

    task, query = mine.make_task()
    run = lo.train(task, torch.optim.SGD(task.model.parameters(), lr=0.1), 3, 10, 0, "runs/own")
    lo.SGDIE().score(run, task, query).save("runs/own/scores/sgd-ie.safetensors")
    for out in ("mine.py/page.html", "x" * 300):
        refused = shell("report", "runs/own", "--out", out, "--task", "mine:broken")
        assert (refused.code, "cannot be written" in refused.refusal) == (1, True)
    bare = shell("report", "runs/own")
    assert bare.code == 0, bare.err
    assert "Give --task" in bare.words
    assert data(Path("runs/own/report.html"))["shown"] == {}
    done = shell("report", "runs/own", "--task", "mine:make_task", "--show", "mine:picture", "--again")
    assert done.code == 0, done.err
    shown = data(Path("runs/own/report.html"))["shown"]
    assert shown["0"]["text"].startswith("a row that starts with ")
    wrong = shell("report", "runs/own", "--show", "mine:pictur", "--again")
    assert wrong.code == 2
    assert "mine has no 'pictur' (did you mean picture?)" in wrong.refusal
    sys.modules.pop("mine", None)
