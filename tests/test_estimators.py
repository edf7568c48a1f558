"""Every estimator against dense matrices, finite differences and retraining, in float64."""

from functools import partial

import numpy as np
import pytest
import torch

import leaveout as lo
from problems import MODELS, OPTIMIZERS, flat, mostly_full, shared, shuffled, with_least_memory

ESTIMATORS = {"tracin": lo.TracIn, "sgdie": lo.SGDIE, "acc": partial(lo.ACC, "exact")}

BATCHES = [[0, 1, 2, 3], [4, 5], [1, 4, 0, 1], [2, 3, 5], [0, 5, 3, 2], [4, 1]]
"""Ragged; example 1 twice in one batch, every example several times."""


PAIRS = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]
FEW = [("mlp", "nesterov"), ("conv", "momentum"), ("logistic", "decay"), ("mlp", "adamw")]
"""Every model, and steps with and without momentum, linear in the gradient and not."""
MORE = [*FEW, ("mlp", "sgd"), ("logistic", "adam")]


def close(actual, expected, tolerance=1e-9):
    scale = expected.abs().max()
    assert scale > 1e-7, "a comparison with zero shows nothing"
    assert (actual - expected).abs().max() <= tolerance * scale


@pytest.mark.parametrize(("model", "optimizer"), mostly_full(PAIRS, *MORE))
def test_displacements_equal_dense_products(tmp_path, model, optimizer):
    problem = shared(model, optimizer, batches=BATCHES)
    rows = [[k] for k in range(problem.n)]
    for method, estimator in ESTIMATORS.items():
        scores = estimator().score(problem.run, problem.task, problem.query, displacements=True)
        expected = problem.oracle.displacements(method, rows)
        close(flat(scores, problem.oracle.names), expected)
    # The three differ, so that one cannot pass for another.
    moved = [problem.oracle.displacements(method, rows) for method in ESTIMATORS]
    for a in range(3):
        for b in range(a):
            assert (moved[a] - moved[b]).norm() > 1e-4 * moved[a].norm()


@pytest.mark.parametrize(("model", "optimizer"), mostly_full(PAIRS, *FEW))
@pytest.mark.parametrize("method", ESTIMATORS)
@pytest.mark.parametrize("readout", ["linear", "outputs"])
def test_forward_equals_backward(tmp_path, model, optimizer, method, readout):
    problem = shared(model, optimizer, batches=BATCHES)
    for queries in ("mean", "each"):
        forward, backward = (
            ESTIMATORS[method](readout=readout, direction=direction).score(
                problem.run, problem.task, problem.query, queries=queries
            )
            for direction in ("forward", "backward")
        )
        close(backward.values, forward.values)
        assert forward.values.shape == (problem.n, 1 if queries == "mean" else len(problem.query))


@pytest.mark.parametrize("method", ESTIMATORS)
@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
def test_readouts_equal_their_definitions(tmp_path, method, optimizer):
    problem = shared("conv", optimizer, batches=BATCHES)
    oracle, query = problem.oracle, problem.query.tensors
    theta = oracle.flat(problem.run.final())[: oracle.p].requires_grad_()
    moved = oracle.displacements(method, [[k] for k in range(problem.n)])
    here = oracle.query_losses(theta, *query)
    gradients = torch.stack([torch.autograd.grad(loss, theta, retain_graph=True)[0] for loss in here])
    exact = torch.stack([oracle.query_losses(theta + delta, *query) - here for delta in moved]).detach()

    def outputs(vector):
        return torch.func.functional_call(oracle.model, oracle.named(vector), (query[0],))

    jacobian = torch.autograd.functional.jacobian(outputs, theta)
    shifted = [outputs(theta) + jacobian @ delta for delta in moved]
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    by_outputs = torch.stack([loss(z, query[1]) - loss(outputs(theta), query[1]) for z in shifted]).detach()

    expected = {"linear": moved @ gradients.T, "outputs": by_outputs, "exact": exact}
    for readout, values in expected.items():
        scores = ESTIMATORS[method](readout=readout)
        close(scores.score(problem.run, problem.task, problem.query, queries="each").values, values)
        close(scores.score(problem.run, problem.task, problem.query).values, values.mean(1, keepdim=True))


@pytest.mark.parametrize(("model", "optimizer"), mostly_full(PAIRS, *MORE))
def test_sgdie_is_the_derivative_of_retraining(tmp_path, model, optimizer):
    problem = shared(model, optimizer, batches=BATCHES)
    step = 1e-4
    up, down = (
        lo.Replay(weight=1 + sign * step).score(problem.run, problem.task, problem.query, queries="each").values
        for sign in (1, -1)
    )
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query, queries="each")
    close(scores.values, -(up - down) / (2 * step), tolerance=1e-5)


@pytest.mark.parametrize(("model", "optimizer"), mostly_full(PAIRS, *MORE))
def test_replay_equals_retraining_in_a_plain_loop(tmp_path, model, optimizer):
    problem = shared(model, optimizer, batches=BATCHES)
    oracle = problem.oracle
    theta = oracle.flat(problem.run.final())[: oracle.p]
    truth = lo.Replay().score(problem.run, problem.task, problem.query, queries="each", displacements=True)
    retrained = torch.stack([oracle.retrained([k]) for k in range(problem.n)])
    close(flat(truth, oracle.names), retrained - theta)
    here = oracle.query_losses(theta, *problem.query.tensors)
    close(truth.values, torch.stack([oracle.query_losses(t, *problem.query.tensors) - here for t in retrained]))


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_groups_leave_together(tmp_path, optimizer):
    problem = shared("mlp", optimizer, batches=BATCHES)
    groups = {"ann": [0, 2], "bob": [1, 2, 5], "all but one": [0, 1, 2, 3, 4]}
    rows = list(groups.values())
    for method, estimator in ESTIMATORS.items():
        scores = estimator().score(problem.run, problem.task, problem.query, groups=groups, displacements=True)
        assert scores.train_ids == tuple(groups)
        close(flat(scores, problem.oracle.names), problem.oracle.displacements(method, rows))
        backward = estimator(direction="backward").score(problem.run, problem.task, problem.query, groups=groups)
        close(backward.values, scores.values)
    truth = lo.Replay().score(problem.run, problem.task, problem.query, groups=groups, displacements=True)
    theta = problem.oracle.flat(problem.run.final())[: problem.oracle.p]
    close(flat(truth, problem.oracle.names), torch.stack([problem.oracle.retrained(r) for r in rows]) - theta)
    single = lo.Replay([3, 1]).score(problem.run, problem.task, problem.query)
    assert single.train_ids == (3, 1)
    close(single.values[1], lo.Replay().score(problem.run, problem.task, problem.query).values[1])


@pytest.mark.full
def test_memory_budget_changes_no_score(tmp_path):
    problem = shared("conv", "adam", batches=BATCHES)
    for estimator in (lo.SGDIE(), lo.ACC("exact"), lo.ACC("exact", direction="backward"), lo.TracIn(), lo.Replay()):
        for queries in ("mean", "each"):
            ask = partial(estimator.score, problem.run, problem.task, problem.query, queries=queries)
            tight = with_least_memory(lambda resources, ask=ask: ask(resources=resources))
            close(tight.values, ask().values)


def test_an_example_that_never_occurs_scores_zero(tmp_path):
    problem = shared("mlp", "momentum", batches=[[0, 1], [2, 3], [3, 0]])
    for estimator in (lo.SGDIE(), lo.ACC("exact"), lo.ACC("exact", direction="backward"), lo.TracIn(), lo.Replay()):
        values = estimator.score(problem.run, problem.task, problem.query).values[:, 0]
        assert values[4] == values[5] == 0
        assert (values[:4].abs() > 1e-6).all()


def test_cost_counts_products(tmp_path):
    problem = shared("mlp", "sgd", batches=BATCHES)
    n, steps = problem.n, len(problem.run)
    args = (problem.run, problem.task, problem.query)
    assert lo.TracIn().score(*args).cost.hvps == 0
    assert lo.SGDIE().score(*args).cost.hvps == steps
    assert lo.SGDIE(direction="forward").score(*args).cost.hvps == steps * n
    assert lo.ACC("exact").score(*args).cost.hvps == steps * n
    replay = lo.Replay().score(*args).cost
    first = {k: min(i for i in range(steps) if k in problem.run.record(i).ids) for k in range(n)}
    assert replay.gradients == steps + sum(steps - first[k] for k in range(n))  # one model with every example, too
    assert replay.hvps == 0
    assert replay.seconds > 0
    assert replay.peak_memory > 10**6


def test_acc_is_exact_on_quadratic_losses_and_sgdie_is_not(tmp_path):
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    train = torch.utils.data.TensorDataset(x, x @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.1)
    query = torch.utils.data.TensorDataset(x[:3] + 1, torch.zeros(3).double())
    for number, make in enumerate((OPTIMIZERS["sgd"], OPTIMIZERS["nesterov"])):
        model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0)).double()
        task = lo.Task(model, torch.nn.MSELoss(), train, l2=0.1)
        run = lo.train(task, make(model), epochs=4, batch_size=3, seed=0, out=tmp_path / f"run{number}")
        truth = lo.Replay().score(run, task, query, displacements=True).displacements
        for readout in ("exact",):
            acc = lo.ACC("exact", readout=readout).score(run, task, query, displacements=True)
            close(acc.values, lo.Replay().score(run, task, query).values, 1e-10)
        sgdie = lo.SGDIE().score(run, task, query, displacements=True).displacements
        for name, expected in truth.items():
            close(acc.displacements[name], expected, 1e-10)
            assert (sgdie[name] - expected).norm() > 1e-3 * expected.norm()
        once = lo.train(task, make(model), epochs=1, batch_size=3, seed=0, out=tmp_path / f"once{number}")
        # Where no example recurs there is nothing to correct.
        close(lo.SGDIE(readout="exact").score(once, task, query).values, lo.Replay().score(once, task, query).values)


def test_error_falls_with_the_square_of_the_learning_rate(tmp_path):
    rates = [0.2 * 0.5**j for j in range(5)]
    errors = {"acc": [], "sgdie": []}
    for rate in rates:
        problem = shared(
            "mlp", lambda m, rate=rate: torch.optim.SGD(m.parameters(), lr=rate), n=8,
            batches=shuffled(8, 4, 4),
        )  # fmt: skip
        args = (problem.run, problem.task, problem.query)
        truth = flat(lo.Replay().score(*args, displacements=True), problem.oracle.names)
        for method in errors:
            moved = flat(ESTIMATORS[method]().score(*args, displacements=True), problem.oracle.names)
            errors[method].append(float((moved - truth).norm() / truth.norm()))
    slopes = {method: _slope(rates, values) for method, values in errors.items()}
    assert slopes["acc"] == pytest.approx(2, abs=0.15)
    assert slopes["sgdie"] == pytest.approx(1, abs=0.15)


def _slope(x, y):
    x, y = torch.tensor(x).log(), torch.tensor(y).log()
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def test_options_given_as_lists_serve_as_well(tmp_path):
    """An estimator is looked up by what it is, so that its options must be hashable."""
    problem = shared("logistic", batches=BATCHES)
    (scores,) = lo.score([lo.Replay([3, 1])], problem.run, problem.task, problem.query)
    assert scores.train_ids == (3, 1)
    assert lo.Replay(torch.tensor([3, 1])) == lo.Replay(np.array([3, 1])) == lo.Replay((3, 1))
    layers = [next(iter(problem.task.objective.names))]
    kinds = (
        lo.SGDIE,
        lo.TracIn,
        lo.DVEmb,
        lo.AdamIE,
        lo.InfluenceFunction,
        lambda layers: lo.ACC("exact", layers=layers),
    )
    for kind in kinds:
        assert hash(kind(layers=layers)) == hash(kind(layers=tuple(layers)))
        assert kind(layers=layers) == kind(layers=tuple(layers))
    one, two = lo.score([lo.SGDIE(layers=layers)] * 2, problem.run, problem.task, problem.query)
    assert torch.equal(one.values, two.values)
