"""Runs and scores that version 0.1 wrote still open, and still mean the same."""

import json
from pathlib import Path

import pytest
import torch

import leaveout as lo
from problems import MODELS, data_for

OLD = Path(__file__).parent / "fixtures" / "v0.1"


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_a_run_and_its_scores_of_version_0_1_are_read(name):
    make, loss, l2 = MODELS["mlp"]
    run = lo.open_run(OLD / name)
    task = lo.Task(make(), loss, data_for("mlp", 6, 0), l2=l2)
    query = data_for("mlp", 4, 1)
    expected = json.loads((OLD / f"{name}.json").read_text())

    saved = lo.Scores.load(OLD / name / "scores" / "sgd-ie.safetensors")
    now = lo.SGDIE().score(run, task, query)
    replayed = lo.Replay().score(run, task, query)

    assert lo.check_run(OLD / name) == []
    assert saved.method == now.method == "SGD-IE"
    saved.check_same_run(run)
    saved.check_same_queries(now)
    for scores, key in ((saved, "sgdie"), (now, "sgdie"), (replayed, "replay")):
        wanted = torch.tensor(expected[key], dtype=torch.float64)
        torch.testing.assert_close(scores.values[:, 0], wanted, rtol=1e-9, atol=0)
