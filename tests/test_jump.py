"""The jump of steps that are not linear in the gradient, against dense matrices in float64."""

import pytest
import torch

import leaveout as lo
from oracle import Oracle
from problems import Problem, shared
from refusal import refused
from test_estimators import BATCHES, close

NONLINEAR = ["adam", "adamw"]


@pytest.fixture(scope="module", params=[(model, rule) for model in ("mlp", "conv") for rule in NONLINEAR])
def problem(request, tmp_path_factory) -> Problem:
    model, optimizer = request.param
    return shared(model, optimizer, batches=BATCHES)


def query_gradients(oracle: Oracle, query) -> torch.Tensor:
    theta = oracle.flat(oracle.run.final())[: oracle.p].requires_grad_()
    losses = oracle.query_losses(theta, *query.tensors)
    return torch.stack([torch.autograd.grad(loss, theta, retain_graph=True)[0] for loss in losses])


def scored(problem: Problem, estimator=None, **asked) -> torch.Tensor:
    return (estimator or lo.ACC()).score(problem.run, problem.task, problem.query, **asked).values


def test_jumps_equal_dense_products_for_the_mean_and_for_each_query(problem):
    rows = [[k] for k in range(problem.n)]
    gradients = query_gradients(problem.oracle, problem.query)
    expected = torch.stack([problem.oracle.jumps(g, rows) for g in gradients], dim=1)
    close(scored(problem, queries="each"), expected)
    close(scored(problem), expected.mean(1, keepdim=True))
    plain = scored(problem, lo.SGDIE())
    assert (scored(problem) - plain).norm() > 1e-3 * plain.norm()  # one cannot pass for the other


def test_sgdie_comes_from_the_same_sweep(problem):
    acc, sgdie = lo.score([lo.ACC(), lo.SGDIE()], problem.run, problem.task, problem.query)
    assert (acc.method, sgdie.method) == ("ACC(jump)", "SGD-IE")
    assert acc.cost == sgdie.cost
    close(sgdie.values, scored(problem, lo.SGDIE()))
    close(acc.values, scored(problem))


def test_groups_add_the_jumps_of_their_examples(problem):
    """An example twice in a batch leaves once; groups may overlap."""
    groups = {"ann": [0, 2], "bob": [1, 2, 5], "all but one": [0, 1, 2, 3, 4]}
    gradient = query_gradients(problem.oracle, problem.query).mean(0)
    single = problem.oracle.jumps(gradient, [[k] for k in range(problem.n)])
    expected = torch.stack([single[members].sum() for members in groups.values()])
    close(scored(problem, groups=groups)[:, 0], expected)


def test_a_small_budget_changes_nothing(problem):
    close(scored(problem, resources=lo.Resources(shard=2)), scored(problem), tolerance=1e-12)


def test_only_chosen_occurrences_jump(problem):
    rows = [[k] for k in range(problem.n)]
    gradient = query_gradients(problem.oracle, problem.query).mean(0)
    early = problem.oracle.jumps(gradient, rows, where=lambda i, _row: problem.run.record(i).epoch < 1)
    close(scored(problem, lo.ACC(epochs=1))[:, 0], early)
    close(scored(problem, lo.ACC("jump", probability=0.0)), scored(problem, lo.SGDIE()))


def test_for_sgd_the_jump_is_sgdie(tmp_path):
    problem = shared("mlp", "nesterov", batches=BATCHES)
    close(scored(problem, lo.ACC("jump")), scored(problem, lo.SGDIE()))


def test_the_jump_goes_backward_only(problem):
    with refused(lo.InputError, "direction-fixed", "direction"):
        scored(problem, lo.ACC("jump", direction="forward"))
