"""leaveout labels as a user meets it."""

import csv

import pytest
import torch

import leaveout as lo
from commands import OWN, Shell

TRAINED = "train --data digits --n-train 200 --n-val 40 --flip 0.1 --hidden 12 --activation tanh --out runs/x"


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys) -> Shell:
    monkeypatch.setenv("COLUMNS", "200")
    return Shell(tmp_path, monkeypatch, capsys)


@pytest.fixture
def run(shell):
    done = shell(*TRAINED.split())
    assert done.code == 0, done.err
    return shell.folder / "runs/x"


def test_the_answer_comes_first_and_the_second_time_from_disk(shell, run):
    done = shell("labels", "runs/x", "--top", "5")
    assert done.code == 0, done.err
    answer = lo.Labels.load(run / "labels.json")
    assert done.words.startswith(f"{len(answer)} of 200 labels look wrong (")
    assert "of the 20 flipped labels are among the first 20" in done.words
    first = answer.issues.iloc[0]
    assert f"{first['given_label']} → {first['predicted_label']}" in done.words
    assert f"and {len(answer) - 5} more" in done.words
    written = (run / "labels.json").stat().st_mtime_ns
    assert shell("labels", "runs/x", "--top", "5").out == done.out
    assert (run / "labels.json").stat().st_mtime_ns == written
    other = shell("labels", "runs/x", "--states", "5")
    assert other.code == 1
    assert other.error == "labels-of-other-question"
    assert "asked for with other options: give --again" in other.refusal
    assert shell("labels", "runs/x", "--states", "5", "--again").code == 0
    assert lo.Labels.load(run / "labels.json").question.states == 5


def test_for_machines_and_for_spreadsheets(shell, run):
    found = shell("labels", "runs/x", "--json", "--csv", "labels.csv", "--top", "3", "--results", "elsewhere").told
    assert found["file"] == "elsewhere/labels.json"
    assert len(found["rows"]) == 3
    assert found["count"] == len(found["ids"])
    assert [row["train"] for row in found["rows"]] == found["ids"][:3]
    with (shell.folder / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 200
    assert {int(row["train"]) for row in rows if row["is_label_issue"] == "True"} == set(found["ids"])
    again = ("labels", "runs/x", "--csv", "labels.csv", "--results", "elsewhere")
    assert shell(*again).code == 0, "the same again is the same"
    (shell.folder / "labels.csv").write_text("mine")
    assert "exists already" in shell(*again).refusal
    assert (shell.folder / "labels.csv").read_text() == "mine"


def test_influence_must_have_been_verified(shell, run):
    assert "has no scores yet" in shell("labels", "runs/x", "--method", "tracin").refusal
    assert shell("score", "runs/x", "--method", "tracin").code == 0
    assert shell("labels", "runs/x", "--method", "tracin").error == "scores-not-verified"
    assert shell("verify", "runs/x", "--replays", "8").code == 0
    done = shell("labels", "runs/x", "--method", "tracin")
    assert done.code == 0, done.err
    assert "TracIn does not count beside what the run showed" in done.words


def test_an_own_task_that_is_no_classifier_is_refused(shell):
    (shell.folder / "mine.py").write_text(OWN)
    own: dict = {"__name__": "mine"}
    exec(OWN, own)  # noqa: S102 - the file's own words
    task, _ = own["make_task"]()
    lo.train(task, torch.optim.SGD(task.model.parameters(), lr=0.1), 3, 10, 0, shell.folder / "runs/own")
    done = shell("labels", "runs/own", "--task", "mine:make_task")
    assert done.code == 1
    assert "Labels can be checked where targets are class numbers" in done.refusal
    assert not (shell.folder / "runs/own/labels.json").exists()


@pytest.mark.parametrize("folds", ["some", "1", "-2", "2.5"])
def test_folds_are_a_number_or_auto(shell, run, folds):
    done = shell("labels", "runs/x", "--folds", folds)
    assert done.code == 2
    assert "neither auto nor a number" in done.err.replace("\n", " ")


def test_folds_zero_asks_the_recorded_states_alone(shell, run):
    assert shell("labels", "runs/x", "--folds", "0").code == 0
    assert lo.Labels.load(run / "labels.json").question.folds is None
    assert "give --again" in shell("labels", "runs/x", "--folds", "3").refusal
    assert shell("labels", "runs/x", "--folds", "3", "--again").code == 0
    assert lo.Labels.load(run / "labels.json").folds == 3
