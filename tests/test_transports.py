"""The cheap transports of ACC: both orders, their limits, and what they cost."""

from functools import partial

import pytest
import torch

import leaveout as lo
from leaveout.optim import Rule
from leaveout.sweep.free_transport import Layout, LazyVectors, sketch
from problems import MODELS, OPTIMIZERS, mostly_full, shared, with_least_memory
from refusal import refused
from test_estimators import BATCHES, close

LINEAR = [name for name in OPTIMIZERS if not name.startswith("adam")]
ALIKE = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.3, weight_decay=0.05),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.6, nesterov=True),
    "dampened": lambda m: torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.6, dampening=0.3, weight_decay=0.1),
}
"""The same settings for all parameters, as the subspace needs."""
PAIRS = [(model, optimizer) for model in MODELS for optimizer in LINEAR]
FEW = [("logistic", "decay"), ("mlp", "sgd"), ("mlp", "nesterov")]


@pytest.mark.parametrize(("model", "optimizer"), mostly_full(PAIRS, *FEW))
def test_free_transport_equals_its_dense_form_in_both_orders(tmp_path, model, optimizer):
    problem = shared(model, optimizer, batches=BATCHES)
    oracle = problem.oracle
    theta = oracle.flat(problem.run.final())[: oracle.p].requires_grad_()
    query = torch.autograd.grad(oracle.query_losses(theta, *problem.query.tensors).mean(), theta)[0]
    expected = oracle.freely_corrected(query, [[k] for k in range(problem.n)])
    for direction in ("forward", "backward"):
        scores = lo.ACC(direction=direction).score(problem.run, problem.task, problem.query)
        close(scores.values[:, 0], expected)
    plain = lo.SGDIE().score(problem.run, problem.task, problem.query).values[:, 0]
    assert (plain - expected).norm() > 1e-4 * expected.norm()


@pytest.mark.parametrize("optimizer", mostly_full(LINEAR, "nesterov"))
@pytest.mark.parametrize("readout", mostly_full(["linear", "outputs"], "linear"))
def test_the_two_orders_agree_for_every_query(tmp_path, optimizer, readout):
    problem = shared("conv", optimizer, batches=BATCHES)
    asks = [
        partial(lo.ACC(readout=readout, direction=direction).score, problem.run, problem.task, problem.query)
        for direction in ("forward", "backward")
    ]
    forward, backward = (ask(queries="each") for ask in asks)
    close(backward.values, forward.values)
    for ask in asks:  # a pair of row and example at a time, and what is held in files
        tight = with_least_memory(lambda resources, ask=ask: ask(queries="each", resources=resources))
        close(tight.values, forward.values)


@pytest.mark.parametrize("groups", [None, [[0, 2], [1, 2, 5], [4, 1]]])
def test_a_small_budget_changes_no_score(tmp_path, groups):
    """Groups that share examples have more pairs than a batch has examples."""
    problem = shared("mlp", "momentum", batches=BATCHES)
    methods = [lo.ACC("free"), lo.ACC("free", sketch=64), lo.ACC("free", probability=0.5)]
    for method in methods:
        ask = partial(method.score, problem.run, problem.task, problem.query, groups=groups)
        close(with_least_memory(lambda resources, ask=ask: ask(resources=resources)).values, ask().values)


@pytest.mark.parametrize("optimizer", LINEAR)
def test_groups_are_corrected_together(tmp_path, optimizer):
    problem = shared("mlp", optimizer, batches=BATCHES)
    groups = [[0, 2], [1, 2, 5], [4]]
    oracle = problem.oracle
    theta = oracle.flat(problem.run.final())[: oracle.p].requires_grad_()
    query = torch.autograd.grad(oracle.query_losses(theta, *problem.query.tensors).mean(), theta)[0]
    expected = oracle.freely_corrected(query, groups)
    for direction in ("forward", "backward"):
        scores = lo.ACC(direction=direction).score(problem.run, problem.task, problem.query, groups=groups)
        close(scores.values[:, 0], expected)


@pytest.mark.parametrize("optimizer", ALIKE)
@pytest.mark.parametrize("model", mostly_full(MODELS, "logistic", "mlp"))
def test_a_subspace_of_full_rank_is_exact(tmp_path, model, optimizer):
    problem = shared(model, ALIKE[optimizer], batches=BATCHES)
    args = (problem.run, problem.task, problem.query)
    exact = lo.ACC("exact").score(*args, queries="each").values
    full = lo.ACC(lo.Subspace(rank=1000)).score(*args, queries="each").values
    close(full, exact)
    free, some = lo.ACC().score(*args).values, lo.ACC(lo.Subspace(rank=3)).score(*args).values
    assert (some - exact.mean(1, keepdim=True)).norm() < (free - exact.mean(1, keepdim=True)).norm()


def test_a_subspace_refuses_groups_that_differ(tmp_path):
    problem = shared("mlp", "sgd", batches=BATCHES)
    with refused(lo.UnsupportedError, "hyperparameters-differ", "transport='free'"):
        lo.ACC(lo.Subspace(2)).score(problem.run, problem.task, problem.query)


@pytest.mark.parametrize("transport", ["free", lo.Subspace(2)])
def test_adam_is_refused_with_the_alternatives(tmp_path, transport):
    problem = shared("mlp", "adam", batches=BATCHES)
    with refused(lo.UnsupportedError, "step-not-linear", "Adam", "transport='exact'"):
        lo.ACC(transport).score(problem.run, problem.task, problem.query)


def test_the_exact_readout_and_displacements_need_exact_transport(tmp_path):
    problem = shared("mlp", "sgd", batches=BATCHES)
    for estimator, options in ((lo.ACC("free", readout="exact"), {}), (lo.ACC("free"), {"displacements": True})):
        with refused(lo.InputError, "readout-needs-exact", "transport='exact'"):
            estimator.score(problem.run, problem.task, problem.query, **options)


def test_what_is_left_open_is_chosen_for_the_run(tmp_path):
    plain, adam = (shared("mlp", kind, batches=BATCHES) for kind in ("sgd", "adam"))
    assert lo.ACC().score(plain.run, plain.task, plain.query).method == "ACC(free)"
    cases = (
        (adam, {"displacements": True}, "linear"),
        (plain, {"displacements": True}, "linear"),
        (plain, {}, "exact"),
    )
    for problem, options, readout in cases:
        args = (problem.run, problem.task, problem.query)
        scores = lo.ACC(readout=readout).score(*args, **options)
        assert scores.method.startswith("ACC(exact")
        close(scores.values, lo.ACC("exact", readout).score(*args, **options).values)
    assert lo.score([lo.ACC()], adam.run, adam.task, adam.query)[0].method == "ACC(jump)"
    assert lo.ACC("subspace") == lo.ACC(lo.Subspace(8))


def test_cost_of_the_free_transport(tmp_path):
    problem = shared("conv", "momentum", batches=BATCHES)
    args, steps = (problem.run, problem.task, problem.query), len(problem.run)
    assert lo.ACC().score(*args).cost.hvps == steps
    assert lo.ACC().score(*args, queries="each").cost.hvps == steps * (len(problem.query) + 1)
    assert lo.ACC(readout="outputs").score(*args).cost.hvps == steps * (3 * len(problem.query) + 1)


@pytest.mark.parametrize("optimizer", ["momentum", "decay"])
def test_a_sketch_is_unbiased_and_narrows_with_its_width(tmp_path, optimizer):
    problem = shared("conv", optimizer, batches=BATCHES)
    args = (problem.run, problem.task, problem.query)
    whole = lo.ACC().score(*args).values
    plain = lo.SGDIE().score(*args).values
    errors = [float((lo.ACC(sketch=width).score(*args).values - whole).norm()) for width in (8, 20_000)]
    assert errors[1] < 0.1 * errors[0]
    assert errors[1] < 0.05 * float((whole - plain).norm())


def test_sketches_keep_inner_products_on_average():
    params = {"a": torch.randn(3, 50, dtype=torch.float64), "b": torch.randn(3, 40, dtype=torch.float64)}
    rule = Rule("SGD", {"a": 0, "b": 1}, ("param",))
    layout = Layout(rule, {name: tensor[0] for name, tensor in params.items()})
    x = layout.flatten(params)
    products = torch.stack([s(x) @ s(x).T for s in (sketch(layout, 16, x, seed) for seed in range(4000))])
    spread = products.std(0) / len(products) ** 0.5
    assert ((products.mean(0) - x @ x.T).abs() < 5 * spread).all()
    lengths = x.norm(dim=1)
    assert (products.std(0) < (2 / 16) ** 0.5 * lengths[:, None] * lengths * 1.1).all()


@pytest.mark.parametrize("disk", [False, True])
def test_lazy_vectors_equal_moving_every_row_every_step(disk):
    generator = torch.Generator().manual_seed(0)
    group = torch.tensor([0, 0, 1, 1, 1])
    rows = LazyVectors(7, 2, group, torch.zeros((), dtype=torch.float64), disk=disk)
    slow = torch.zeros(7, 2, 5, dtype=torch.float64)
    for step in range(600):
        chosen = torch.randperm(7, generator=generator)[:2]
        terms = torch.randn(2, 2, 5, dtype=torch.float64, generator=generator)
        rows.add(chosen, terms)
        slow[chosen] += terms
        if step % 3:
            carry = 0.5 * torch.randn(2, 2, 2, dtype=torch.float64, generator=generator)
            rows.advance(carry)
            slow = torch.einsum("wst,rtw->rsw", carry[group], slow)
        assert (rows.now(torch.arange(7)) - slow).abs().max() <= 1e-12 * slow.abs().max()
