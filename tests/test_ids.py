"""Chosen examples can be scored by every estimator, and get the values that they have among all."""

import pytest
import torch

import leaveout as lo
from problems import recorded
from refusal import refused

METHODS = {
    "acc": lo.ACC("free"),
    "acc exact": lo.ACC("exact"),
    "sgd-ie": lo.SGDIE(),
    "sgd-ie forward": lo.SGDIE(direction="forward"),
    "tracin": lo.TracIn(),
    "tracin epochs": lo.TracIn(checkpoints="epochs"),
    "dvemb": lo.DVEmb(),
    "influence": lo.InfluenceFunction(damping=0.1),
    "replay": lo.Replay(),
}


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("ids") / "run", "logistic", "momentum")


@pytest.mark.parametrize("name", METHODS)
def test_chosen_examples_have_their_scores_among_all(problem, name):
    given = (problem.run, problem.task, problem.query)
    everyone = METHODS[name].score(*given)
    some = METHODS[name].score(*given, ids=[4, 1])
    assert some.train_ids == (4, 1)
    torch.testing.assert_close(some.values, everyone.values[[4, 1]], rtol=1e-9, atol=1e-12)
    assert some.all_exact == (name == "replay")


def test_chosen_examples_go_through_a_shared_sweep(problem):
    acc, sgdie = lo.score([lo.ACC("free"), lo.SGDIE()], problem.run, problem.task, problem.query, ids=[2])
    assert acc.train_ids == sgdie.train_ids == (2,)
    with refused(lo.InputError, "ids-given-twice"):
        lo.Replay(ids=[1]).score(problem.run, problem.task, problem.query, ids=[2])
