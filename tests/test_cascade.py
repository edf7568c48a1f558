"""Several methods at once, and exact replays for the few that matter."""

from dataclasses import replace

import pytest
import torch

import leaveout as lo
from problems import mostly_full, shared
from refusal import refused
from test_estimators import BATCHES, close


@pytest.mark.parametrize("transport", ["free", lo.Subspace(2)])
@pytest.mark.parametrize("readout", mostly_full(["linear", "outputs"], "linear"))
def test_methods_that_share_a_sweep_score_as_they_do_alone(tmp_path, readout, transport):
    optimizer = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5)  # noqa: E731
    problem = shared("mlp", optimizer, batches=BATCHES)
    args = (problem.run, problem.task, problem.query)
    estimators = [lo.TracIn(), lo.SGDIE(readout), lo.ACC(transport, readout), lo.ACC("exact"), lo.Replay()]
    together = lo.score(estimators, *args, queries="each")
    assert [scores.method for scores in together] == [estimator.name for estimator in estimators]
    for estimator, scores in zip(estimators, together, strict=True):
        close(scores.values, estimator.score(*args, queries="each").values)
    assert together[1].cost is together[2].cost
    with refused(lo.InputError, "estimator-missing"):
        lo.score([], *args)


def test_groups_together(tmp_path):
    problem = shared("mlp", "nesterov", batches=BATCHES)
    args = (problem.run, problem.task, problem.query)
    groups = {"a": [0, 1], "b": [2]}
    estimators = [lo.SGDIE(), lo.ACC()]
    for scores, alone in zip(lo.score(estimators, *args, groups=groups), estimators, strict=True):
        assert scores.train_ids == ("a", "b")
        close(scores.values, alone.score(*args, groups=groups).values)


@pytest.mark.parametrize("queries", ["mean", "each"])
def test_the_most_extreme_are_replaced_by_replays(tmp_path, queries):
    problem = shared("mlp", "sgd", n=12, batches=None)
    args = (problem.run, problem.task, problem.query)
    rough = lo.TracIn().score(*args, queries=queries)
    truth = lo.Replay().score(*args, queries=queries)
    refined = lo.refine(rough, *args, top=5)
    assert refined.method == "TracIn + Replay"
    assert int(refined.exact.sum()) == 5
    order = rough.mean().argsort().tolist()
    assert set(refined.exact.nonzero().flatten().tolist()) == set(order[:2] + order[-3:])
    close(refined.values[refined.exact], truth.values[refined.exact])
    assert torch.equal(refined.values[~refined.exact], rough.values[~refined.exact])
    assert rough.exact is None
    assert refined.cost.gradients > rough.cost.gradients
    again = lo.refine(refined, *args, top=12)
    assert again.exact.all()
    assert again.method == "TracIn + Replay"
    close(again.values, truth.values)
    loaded = lo.Scores.load(again.save(tmp_path / "scores.safetensors"))
    assert torch.equal(loaded.exact, again.exact)


def test_groups_are_replayed_too(tmp_path):
    problem = shared("mlp", "sgd", n=12, batches=None)
    args = (problem.run, problem.task, problem.query)
    groups = {f"source {i}": [i, (i + 1) % 12, (i + 5) % 12] for i in range(9)}
    rough, truth = (method.score(*args, groups=groups) for method in (lo.SGDIE(), lo.Replay()))
    loaded = lo.Scores.load(rough.save(tmp_path / "scores.safetensors"))
    assert loaded.groups == {name: sorted(ids) for name, ids in groups.items()}
    refined = lo.refine(loaded, *args, top=4)
    close(refined.values[refined.exact], truth.values[refined.exact])
    assert int(refined.exact.sum()) == 4
    check = lo.verify(loaded, *args, replays=8)
    expected = [float(truth.to_frame()["mean"][name]) for name in check.table.index]
    assert check.table["truth"].tolist() == pytest.approx(expected, rel=1e-9)
    assert set(check.table.index) <= set(groups)


def test_scores_of_another_unit_are_checked_by_their_order(tmp_path):
    problem = shared("mlp", "adam", n=12, batches=None)
    args = (problem.run, problem.task, problem.query)
    check = lo.verify(lo.AdamIE().score(*args), *args, replays=8)
    assert "tau" in check.sentence
    assert "error" not in check.sentence
    assert lo.Check.load(check.save(tmp_path / "check.json")).sentence == check.sentence


def test_refinements_that_cannot_be_are_refused(tmp_path):
    problem = shared("mlp", "sgd", batches=BATCHES)
    args = (problem.run, problem.task, problem.query)
    with refused(lo.InputError, "unit-not-comparable", "inner product of gradients"):
        lo.refine(lo.TracIn(learning_rate=False).score(*args), *args)
    with refused(lo.InputError, "top-not-a-count", "top=0"):
        lo.refine(lo.SGDIE().score(*args), *args, top=0)
    with refused(lo.InputError, "queries-differ"):
        lo.refine(lo.SGDIE().score(*args, queries="each"), problem.run, problem.task, problem.train)


@pytest.mark.parametrize("top", [10, 30])
def test_verify_is_of_the_estimates_that_are_left(tmp_path, top):
    problem = shared("mlp", "sgd", n=40, batches=None)
    args = (problem.run, problem.task, problem.query)
    order = torch.Generator().manual_seed(0)
    rough = lo.SGDIE().score(*args)
    noise = torch.randn(rough.values.shape, generator=order, dtype=rough.values.dtype)
    noisy = replace(rough, values=float(rough.values.std()) * noise)  # says nothing
    refined = lo.refine(noisy, *args, top=top)
    check = lo.verify(refined, *args, replays=10, moves=0)
    exact = {i for i, is_exact in zip(refined.train_ids, refined.exact.tolist(), strict=True) if is_exact}
    assert len(exact) == top
    assert not exact & set(check.table.index)
    assert (check.table["score"] - check.table["truth"]).abs().min() > 1e-9, "a replay was compared with itself"
    assert f"besides the {top} scores that are replays" in check.sentence
    left = [row for row in refined.mean().argsort().tolist() if row not in exact]
    extreme = check.table[check.table["sample"] == "extreme"].index.tolist()
    assert sorted(extreme) == sorted(left[:2] + left[-3:])
    assert lo.Check.load(check.save(tmp_path / "check.json")) == check
    check.check_same_scores(refined)


def test_too_few_estimates_are_not_ranked(tmp_path):
    problem = shared("mlp", "sgd", n=12, batches=None)
    args = (problem.run, problem.task, problem.query)
    refined = lo.refine(lo.SGDIE().score(*args), *args, top=6)
    with refused(lo.InputError, "too-few-estimates", "Only 6 of the 12", "top=12"):
        lo.verify(refined, *args)
    assert lo.verify(lo.refine(refined, *args, top=12), *args).exact


def test_influence_on_oneself_is_compared_with_replays(tmp_path):
    problem = shared("mlp", "sgd", n=12, batches=None)
    args = (problem.run, problem.task, problem.query)
    own = lo.SGDIE().self_influence(problem.run, problem.task)
    truth = lo.Replay().score(problem.run, problem.task, problem.train, queries="each").values.diagonal()
    exact = lo.Replay().self_influence(problem.run, problem.task)
    close(exact.values[:, 0], truth)
    assert exact.all_exact
    check = lo.verify(own, *args, replays=12, moves=0)
    assert check.table["truth"].tolist() == pytest.approx(truth[check.table.index.tolist()].tolist(), abs=1e-10)
    close(lo.refine(own, *args, top=12).values[:, 0], truth)
    assert lo.metrics.tsloo(own, *args).count == 12
    with refused(lo.InputError, "queries-self"):
        lo.metrics.lds(own, *args)
