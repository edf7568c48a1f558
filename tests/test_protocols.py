"""The field's protocols against brute force: plain loops over retrained models, and scikit-learn."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score

import leaveout as lo
from leaveout.evaluate.metrics.linear_datamodel import noise_ceiling
from leaveout.trajectory.replay import moved_start
from leaveout.trajectory.trajectory import Trajectory
from problems import Problem, shared


@cache
def scored() -> tuple[Problem, lo.Scores]:
    problem = shared("mlp", n=12)
    return problem, lo.SGDIE().score(problem.run, problem.task, problem.query, queries="each")


def retrained(problem: Problem, left_out: list[int], start: dict | None = None) -> dict[str, torch.Tensor]:
    """The run again by plain PyTorch: recorded batches and rates, the left-out examples' losses times zero."""
    model, loss = torch.nn.Sequential(*problem.task.model), torch.nn.BCEWithLogitsLoss(reduction="none")
    state = {name: tensor.clone() for name, tensor in (start or problem.run.state(0)["param"]).items()}
    params = {name: tensor.requires_grad_() for name, tensor in state.items()}
    x, y = problem.train.tensors
    for step in range(len(problem.run)):
        record = problem.run.record(step)
        weights = torch.tensor([0.0 if int(i) in left_out else 1.0 for i in record.ids], dtype=torch.float64)
        out = torch.func.functional_call(model, params, (x[record.ids],))
        grads = torch.autograd.grad((weights * loss(out, y[record.ids])).sum() / len(weights), list(params.values()))
        rates = [0.2 if p.ndim == 1 else 0.3 for p in params.values()]
        shrink = 0.97**step
        params = {
            name: (p - rate * shrink * g).detach().requires_grad_()
            for (name, p), g, rate in zip(params.items(), grads, rates, strict=True)
        }
    return params


def losses(problem: Problem, params: dict) -> np.ndarray:
    x, y = problem.query.tensors
    out = torch.func.functional_call(problem.task.model, params, (x,))
    return torch.nn.functional.binary_cross_entropy_with_logits(out, y, reduction="none").detach().numpy()


def changes(problem: Problem, groups: list[list[int]], start: dict | None = None) -> np.ndarray:
    whole = losses(problem, retrained(problem, [], start))
    return np.array([losses(problem, retrained(problem, group, start)) - whole for group in groups])


def test_tsloo_is_the_mean_spearman_with_retraining():
    problem, scores = scored()
    truth = changes(problem, [[k] for k in range(12)])
    expected = [stats.spearmanr(scores.values[:, q], truth[:, q]).statistic for q in range(4)]
    measured = lo.metrics.tsloo(scores, problem.run, problem.task, problem.query)
    np.testing.assert_allclose(measured.per_query, expected, atol=1e-12)
    assert measured.value == pytest.approx(np.mean(expected))
    assert (measured.count, measured.ceiling) == (12, None)
    some = lo.metrics.tsloo(scores, problem.run, problem.task, problem.query, replays=7, seed=3)
    rows = torch.randperm(12, generator=torch.Generator().manual_seed(3))[:7].numpy()
    expected = [stats.spearmanr(scores.values[rows, q], truth[rows, q]).statistic for q in range(4)]
    np.testing.assert_allclose(some.per_query, expected, atol=1e-12)


def test_lds_is_the_mean_spearman_of_sums_with_retraining():
    problem, scores = scored()
    measured = lo.metrics.lds(scores, problem.run, problem.task, problem.query, subsets=9, share=0.3, seed=1)
    groups = list(lo.metrics.random_subsets(12, 9, 0.3, 1).values())
    assert {len(set(group)) for group in groups} == {4}
    truth = changes(problem, groups)
    sums = np.array([sum(scores.values[k].numpy() for k in group) for group in groups])
    expected = [stats.spearmanr(sums[:, q], truth[:, q]).statistic for q in range(4)]
    np.testing.assert_allclose(measured.per_query, expected, atol=1e-12)
    named = {str(i): group for i, group in enumerate(groups)}
    whole = lo.SGDIE().score(problem.run, problem.task, problem.query, queries="each", groups=named)
    same = lo.metrics.lds(whole, problem.run, problem.task, problem.query)
    np.testing.assert_allclose(same.per_query, expected, atol=1e-12)


def test_algorithm_lds_takes_sums_over_those_left_out():
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.normal(size=(10, 2)))
    scores = lo.Scores(values, tuple(range(10)), (0, 1), "mine")
    kept = [sorted(rng.choice(10, 5, replace=False).tolist()) for _ in range(8)]
    truth = rng.normal(size=(3, 8, 2))
    measured = lo.metrics.algorithm_lds(scores, kept, truth)
    for q in range(2):
        sums = [sum(float(values[k, q]) for k in range(10) if k not in ids) for ids in kept]
        assert measured.per_query[q] == pytest.approx(stats.spearmanr(sums, truth.mean(0)[:, q]).statistic, abs=1e-12)
    assert math.isnan(lo.metrics.algorithm_lds(scores, kept, truth[:1]).ceiling)
    assert "two seeds" in str(lo.metrics.algorithm_lds(scores, kept, truth[:1]))
    with pytest.raises(lo.InputError) as error:
        lo.metrics.algorithm_lds(scores, kept, truth[0])
    assert error.value.code == "losses-shape"


@pytest.mark.parametrize(("seeds", "noise"), [(2, 1.0), (5, 1.0), (5, 3.0)])
def test_the_ceiling_is_what_a_perfect_prediction_reaches(seeds, noise):
    rng = np.random.default_rng(1)
    signal = rng.normal(size=(400, 30))
    repeats = signal + noise * rng.normal(size=(seeds, 400, 30))
    reached = np.mean([stats.spearmanr(signal[:, q], repeats.mean(0)[:, q]).statistic for q in range(30)])
    assert noise_ceiling(repeats) == pytest.approx(reached, abs=0.02)
    assert noise_ceiling(rng.normal(size=(2, 400, 30))) < 0.2


@pytest.mark.parametrize("ties", [False, True])
def test_detection_is_that_of_scikit_learn(ties):
    rng = np.random.default_rng(2)
    for n in (2, 3, 50, 301):
        wanted = rng.permutation(np.arange(n) < max(1, n // 5))
        suspicion = rng.normal(size=n) + wanted
        suspicion = np.round(suspicion) if ties else suspicion
        assert lo.metrics.auc(suspicion, wanted) == pytest.approx(roc_auc_score(wanted, suspicion), abs=1e-12)
        expected = average_precision_score(wanted, suspicion)
        assert lo.metrics.average_precision(suspicion, wanted) == pytest.approx(expected, abs=1e-12)
    for wanted in ([True, True], [0, 0], [0, 2]):
        with pytest.raises(lo.InputError) as error:
            lo.metrics.auc([0.1, 0.2], wanted)
        assert error.value.code == "wanted-not-two-kinds"


def test_without_helpful_examples_no_prediction_flips():
    problem, scores = scored()
    harmful = replace(scores, values=-scores.values.abs())
    measured = lo.metrics.brittleness(harmful, problem.run, problem.task, problem.query)
    assert measured.table["removed"].isna().all()
    assert str(measured).startswith(f"0 of {len(scores.query_ids)} predictions flip")


def test_brittleness_is_where_retraining_flips_the_prediction():
    problem, scores = scored()
    measured = lo.metrics.brittleness(scores, problem.run, problem.task, problem.query, most=10)
    x = problem.query.tensors[0]

    def predicted(left_out, q):
        params = retrained(problem, left_out)
        return int(torch.func.functional_call(problem.task.model, params, (x[q : q + 1],)) > 0)

    flips = 0
    for q, row in measured.table.iterrows():
        order = torch.argsort(scores.values[:, q], descending=True).tolist()
        helpful = [k for k in order if scores.values[k, q] > 0][:10]
        before = predicted([], q)
        assert row["before"] == before
        if row.isna()["removed"]:
            assert predicted(helpful, q) == before
        else:
            flips += 1
            assert predicted(helpful[: row["removed"]], q) == row["after"] == 1 - before
            assert predicted(helpful[: row["removed"] - 1], q) == before
    assert flips >= 1, "a problem on which nothing flips tests nothing"
    assert f"{flips} of 4" in str(measured)
    mean = lo.SGDIE().score(problem.run, problem.task, problem.query)
    with pytest.raises(lo.InputError) as error:
        lo.metrics.brittleness(mean, problem.run, problem.task, problem.query)
    assert error.value.code == "queries-not-single"
    for other in (torch.utils.data.Subset(problem.query, [1, 0, 2, 3]), torch.utils.data.Subset(problem.query, [0])):
        with pytest.raises(lo.InputError) as error:
            lo.metrics.brittleness(scores, problem.run, problem.task, other)
        assert error.value.code == "queries-differ"


def test_a_replay_from_a_moved_start_is_retraining_from_there():
    problem, _ = scored()
    replay = lo.Replay(move=5, jitter=0.01)
    moved = replay.score(problem.run, problem.task, problem.query, queries="each", ids=[0, 3])
    start = moved_start(Trajectory(problem.run, problem.task), 0.01, 5)["param"]
    first = problem.run.state(0)["param"]

    def flat(params):
        return torch.cat([params[name].flatten() for name in first])

    step = flat(start) - flat(first)
    assert float(step.norm() / flat(first).norm()) == pytest.approx(0.01)
    np.testing.assert_allclose(moved.values.numpy(), changes(problem, [[0], [3]], start), atol=1e-12)
    recorded = lo.Replay().score(problem.run, problem.task, problem.query, queries="each", ids=[0, 3])
    np.testing.assert_allclose(recorded.values.numpy(), changes(problem, [[0], [3]]), atol=1e-12)
    assert moved.method == "Replay(move 5 of 0.01)"
    assert (moved.all_exact, recorded.all_exact) == (False, True)
    assert float((moved.values - recorded.values).abs().max()) > 1e-6
    for jitter in (0, -1.0, 2.0, math.nan, "much"):
        with pytest.raises(lo.InputError) as error:
            lo.Replay(jitter=jitter)
        assert error.value.code == "jitter-out-of-range"
