"""Hessian products in which kinks have curvature, compared with dense matrices that plain autograd and sums give."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.diff.forms import CHANGES, EXAMPLE, VECTOR, VECTORS, Form
from leaveout.diff.hessian import Hessian, KinkedHessian
from leaveout.sweep import kink_size as kink_module
from leaveout.sweep.kink_size import are_mild, kink_size
from leaveout.task.rewrites.kinks import Kinks, inverse_width
from leaveout.task.training_batch import TrainingBatch, Window
from leaveout.trajectory.trajectory import Trajectory

EXAMPLES, FEATURES, UNITS = 9, 3, 4


class Apply(nn.Module):
    """A function as a module, so that one network serves for all of them."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


FUNCTIONS = {
    "relu": (functional.relu, [(0, 1)]),
    "relu in place": (nn.ReLU(inplace=True), [(0, 1)]),
    "Tensor.relu": (torch.Tensor.relu, [(0, 1)]),
    "leaky relu": (lambda x: functional.leaky_relu(x, 0.2), [(0, 0.8)]),
    "leaky relu in place": (nn.LeakyReLU(0.2, inplace=True), [(0, 0.8)]),
    "hardtanh": (lambda x: functional.hardtanh(x, -0.3, 0.4), [(-0.3, 1), (0.4, -1)]),
    "relu6": (lambda x: functional.relu6(x + 5.5), [(-5.5, 1), (0.5, -1)]),
    "nn.ReLU6": (nn.ReLU6(), [(0, 1), (6, -1)]),
    "abs": (abs, [(0, 2)]),
    "clamp": (lambda x: x.clamp(-0.2, 0.5), [(-0.2, 1), (0.5, -1)]),
    "clamp below": (lambda x: torch.clamp(x, min=-0.1), [(-0.1, 1)]),
    "clamp_max": (lambda x: x.clamp_max(0.1), [(0.1, -1)]),
}


def task_of(function, **options):
    """A task with two hidden layers whose units have kinks, in float64."""
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, UNITS), Apply(function), nn.Linear(UNITS, UNITS), Apply(function)]
    model = nn.Sequential(*layers, nn.Linear(UNITS, 2)).double()
    data = TensorDataset(torch.randn(EXAMPLES, FEATURES, dtype=torch.float64), torch.randint(2, (EXAMPLES,)))
    return lo.Task(model, nn.CrossEntropyLoss(), data, **{"check": False, **options})


def bumps(a, points):
    """Σ jump · σ'((a − p)/h)/h of every pre-activation, with h from each unit's spread over the batch."""
    values = a.detach().numpy()
    width = 0.2 * 1.2533 * np.abs(values - values.mean(0)).mean(0)
    width[width == 0] = np.inf  # a unit whose values are all the same
    logistic = [1 / (1 + np.exp(-(values - at) / width)) for at, _ in points]
    return sum(jump * s * (1 - s) / width for (_, jump), s in zip(points, logistic, strict=True))


def dense(model, x, y, points):
    """The Hessians of single examples, with curvature: H + Σ_units (∂ℓ/∂φ) φ''(a) ∇a ∇aᵀ, written out."""
    params = list(model.parameters())
    sizes = [p.numel() for p in params]

    def flat(scalar):
        grads = torch.autograd.grad(scalar, params, retain_graph=True, allow_unused=True)
        return torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(grads, params, strict=True)]
        )

    kept = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, given: kept.append(given[0].clone()))
        for module in model
        if isinstance(module, Apply)
    ]
    fixed = copy.deepcopy(model)
    with torch.no_grad():
        model(x.clone())
    curvature = [bumps(a, points) for a in kept]
    for hook in hooks:
        hook.remove()

    def loss(vector, i):
        parts = vector.split(sizes)
        named = {n: p.view_as(q) for (n, q), p in zip(fixed.named_parameters(), parts, strict=True)}
        return functional.cross_entropy(torch.func.functional_call(fixed, named, (x[i : i + 1],)), y[i : i + 1])

    theta = torch.cat([p.detach().flatten() for p in params])
    matrices, gradients = [], []
    for i in range(len(x)):
        matrix = torch.autograd.functional.hessian(lambda v, i=i: loss(v, i), theta)
        h, places = x[i : i + 1], []
        for module in model:
            if isinstance(module, Apply):
                a, h = h, module(h.clone())
                places.append((a, h))
            else:
                h = module(h)
        value = functional.cross_entropy(h, y[i : i + 1])
        gradients.append(flat(value))
        for (a, out), bent in zip(places, curvature, strict=True):
            outer = torch.autograd.grad(value, out, retain_graph=True)[0][0]
            for unit in range(a.shape[1]):
                along = flat(a[0, unit])
                matrix = matrix + outer[unit] * bent[i, unit] * torch.outer(along, along)
        matrices.append(matrix)
    return torch.stack(matrices).detach(), torch.stack(gradients).detach()


def flattened(stack):
    return torch.cat([tensor.flatten(1) for tensor in stack.values()], 1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_have_the_kinks_curvature_in_every_form(name):
    function, points = FUNCTIONS[name]
    if name == "nn.ReLU6":
        function, points = (lambda x: nn.ReLU6()(10 * x)), [(0, 10), (0.6, -10)]
    task = task_of(function, trace=False)
    x, y = task.train_set.tensors
    params = {n: p.detach() for n, p in task.parameters().items()}
    vectors = {n: torch.randn(3, *p.shape, dtype=p.dtype) for n, p in params.items()}
    own = {n: torch.randn(EXAMPLES, *p.shape, dtype=p.dtype) for n, p in params.items()}
    weights, added = torch.rand(2, 3, EXAMPLES, dtype=torch.float64)
    matrices, gradients = dense(task.model, x, y, points)
    objective = task.objective
    plain = Hessian(objective, params, [x, y]).pull(vectors)[0]
    rows = flattened(vectors)
    whole = rows @ matrices.mean(0)
    assert (flattened(plain) - whole).abs().max() > 1e-3  # the kinks make a difference here
    changes = torch.einsum("rb,bij,rj->ri", weights, matrices, rows) / EXAMPLES + added @ gradients / EXAMPLES
    single = torch.einsum("bij,bj->bi", matrices, flattened(own))

    for form in Form:
        where = {"vector": VECTOR, "vectors": VECTORS, "changes": CHANGES, "example": EXAMPLE}
        chosen = {k: form for k, forms in where.items() if form in forms}
        objective = objective.able(objective.abilities._replace(**chosen))
        curvature = KinkedHessian(objective, params, [x, y])
        one = {n: t[:1] for n, t in vectors.items()}
        products, reads, *_ = curvature.pull(vectors)
        for found, wanted in (
            (flattened(curvature.pull(one)[0]), whole[:1]),
            (flattened(products), whole),
            (reads, rows @ gradients.T / EXAMPLES),
            (flattened(curvature.push(vectors, weights, added)[0]), changes),
            (flattened(curvature.example_products([x, y], own)[1]), single),
            (
                flattened(curvature.example_products([x, y], {n: t[0] for n, t in vectors.items()})[1]),
                (matrices @ rows[0]),
            ),
        ):
            assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-11), form


@pytest.mark.parametrize("name", ["leaky relu in place", pytest.param("clamp", marks=pytest.mark.full)])
def test_traces_give_the_same(name):
    task = task_of(FUNCTIONS[name][0])
    params = {n: p.detach() for n, p in task.parameters().items()}
    batch = task.read(range(EXAMPLES))
    vectors = {n: torch.randn(3, *p.shape, dtype=p.dtype) for n, p in params.items()}
    one, marks = {n: t[:1] for n, t in vectors.items()}, torch.rand(3, EXAMPLES, dtype=torch.float64)

    def everything(given, at):
        curvature = KinkedHessian(given, at, batch)
        parts = [curvature.pull(one)[0], curvature.pull(vectors)[0], curvature.push(vectors, marks, marks)[0]]
        return torch.cat(
            [
                flattened(part)
                for part in [*parts, *curvature.example_products(batch, {n: t[0] for n, t in one.items()})]
            ]
        )

    plain = task.objective.untraced()
    for turn in range(9):  # a trace is made at the seventh
        moved = {n: p + 0.1 * turn for n, p in params.items()}  # widths are not constants of the trace
        assert torch.allclose(everything(task.objective, moved), everything(plain, moved), rtol=1e-12, atol=1e-13)
    tracers = (task.objective.execution.tracer, task.objective.in_mode(kinks=True).execution.tracer)
    traces = {name: trace for tracer in tracers for (name, _), trace in tracer._traces.items()}
    assert len(traces) == 5
    assert all(trace is not None for trace in traces.values())
    assert sum(name.endswith(" kinks") for name in traces) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_do_not_change_by_a_bit(name, dtype):
    task = task_of(FUNCTIONS[name][0], trace=False)
    model = task.model.to(dtype)
    params = {n: p.detach() for n, p in model.named_parameters()}
    batch = [torch.randn(50, FEATURES, dtype=dtype), torch.randint(2, (50,))]
    plain = task.objective
    bent = plain.in_mode(kinks=True)
    assert torch.equal(plain.losses(params, batch), bent.losses(params, batch))
    ones = torch.ones(50, dtype=dtype)
    for straight, curved in zip(*(t.gradient(params, ones, batch).values() for t in (plain, bent)), strict=True):
        assert torch.equal(straight, curved)
    vector = {n: torch.randn_like(p) for n, p in params.items()}
    for form in (Form.FORWARD_REVERSE, Form.REVERSE_REVERSE):
        able = plain.able(plain.abilities._replace(example=form))
        pair = [kind(able, params, batch).example_products(batch, vector)[0] for kind in (Hessian, KinkedHessian)]
        assert all(torch.equal(pair[0][n], pair[1][n]) for n in params)


def test_an_infinite_value_that_is_clamped_has_no_curvature():
    mask = torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64)
    x = torch.tensor([[0.5, -2.0, 3.0]], dtype=torch.float64).T.repeat(1, 3)

    def bent(t):
        with Kinks({}):
            return (t + mask).clamp(min=-1).square().sum()

    slope = torch.func.grad(bent)
    assert torch.equal(slope(x), torch.func.grad(lambda t: (t + mask).clamp(min=-1).square().sum())(x))
    curved = torch.func.jvp(slope, (x,), (torch.ones_like(x),))[1]
    assert curved.isfinite().all()
    assert (curved[:, 2] == 0).all()
    assert (curved[:, :2] != 2 * (x[:, :2] > -1)).any()


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((40, 5), 1), ((6, 7, 5), 2), ((6, 5, 4, 3), 1), ((2, 5, 3, 2, 2), 1), ((40,), None), ((), None)],
)
def test_widths_are_of_units(shape, axis):
    a = torch.randn(shape, dtype=torch.float64)
    other = tuple(i for i in range(len(shape)) if i != axis)
    values = a.numpy()
    spread = np.abs(values - values.mean(axis=other, keepdims=True)).mean(axis=other, keepdims=True)
    found = inverse_width(a)
    assert found.ndim == a.ndim
    wanted = np.divide(1, 0.2 * 1.2533 * spread, out=np.zeros_like(spread), where=spread > 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_widths_of_large_images_are_those_of_every_few_rows_and_columns():
    a = torch.randn(16, 3, 64, 32, dtype=torch.float64)
    assert torch.equal(inverse_width(a), inverse_width(a[..., ::2, ::2].contiguous()))
    other = a.clone()
    other[..., 1::2, :] = 100.0
    assert torch.equal(inverse_width(other), inverse_width(a))


def test_a_window_has_one_width():
    task = task_of(functional.relu, trace=False)
    x, y = task.train_set.tensors
    params = {n: p.detach() for n, p in task.parameters().items()}
    vectors = {n: torch.randn(1, *p.shape, dtype=p.dtype) for n, p in params.items()}
    window = Window((TrainingBatch([x[:4], y[:4]]), TrainingBatch([x[4:], y[4:]])))
    parts, whole = (KinkedHessian(task.objective, params, batch).pull(vectors)[0] for batch in (window, [x, y]))
    assert all(torch.allclose(parts[n], whole[n], rtol=1e-10, atol=1e-13) for n in params)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A small network trained by SGD; each example is met twice."""
    task = task_of(lambda x: functional.leaky_relu(x, 0.2))
    x, y = task.train_set.tensors
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.3)
    recorder = lo.Recorder(tmp_path_factory.mktemp("kinks") / "run", task.model, optimizer)
    states, order = [], torch.randperm(EXAMPLES)
    for epoch in range(2):
        for ids in order.split(5 if epoch else 4):
            states.append((copy.deepcopy(task.model), ids))
            optimizer.zero_grad()
            functional.cross_entropy(task.model(x[ids]), y[ids]).backward()
            recorder.step(ids, [x[ids], y[ids]], epoch=epoch)
            optimizer.step()
    return recorder.finish(), task, states


def oracle(task, states, accumulative):
    """δ of every example by dense matrices."""
    x, y = task.train_set.tensors
    moved = torch.zeros(EXAMPLES, sum(p.numel() for p in task.model.parameters()), dtype=torch.float64)
    for model, ids in states:
        matrices, gradients = dense(model, x[ids], y[ids], [(0, 0.8)])
        after = moved - 0.3 * moved @ matrices.mean(0)
        for place, k in enumerate(ids.tolist()):
            after[k] += 0.3 / len(ids) * gradients[place]
            if accumulative:
                after[k] += 0.3 / len(ids) * matrices[place] @ moved[k]
        moved = after
    return moved


@pytest.mark.parametrize("queries", ["mean", "each"])
@pytest.mark.parametrize("accumulative", [False, True])
def test_scores_are_those_of_dense_matrices_in_every_order(recorded, accumulative, queries):
    run, task, states = recorded
    query = TensorDataset(torch.randn(3, FEATURES, dtype=torch.float64), torch.randint(2, (3,)))
    moved = oracle(task, states, accumulative)
    losses = functional.cross_entropy(task.model(query.tensors[0]), query.tensors[1], reduction="none")
    slopes = []
    for value in [losses.mean()] if queries == "mean" else losses:
        parts = torch.autograd.grad(value, list(task.model.parameters()), retain_graph=True)
        slopes.append(torch.cat([part.flatten() for part in parts]))
    wanted = moved @ torch.stack(slopes).T
    estimators = (
        [lo.ACC("exact", direction=d, kinks=True) for d in ("forward", "backward")]
        if accumulative
        else [lo.SGDIE(direction=d, kinks=True) for d in ("forward", "backward")]
    )
    for estimator in estimators:
        scores = estimator.score(run, task, query, queries=queries)
        assert torch.allclose(scores.values, wanted, rtol=1e-8, atol=1e-12)
        plain = copy.copy(estimator)
        object.__setattr__(plain, "kinks", False)
        assert (plain.score(run, task, query, queries=queries).values - wanted).abs().max() > 1e-6


def test_cheap_transports_have_the_same_curvature(recorded):
    """Free transport in both orders; SGD-IE rides along."""
    run, task, _ = recorded
    query = TensorDataset(torch.randn(3, FEATURES, dtype=torch.float64), torch.randint(2, (3,)))
    orders = [lo.ACC("free", direction=direction, kinks=True) for direction in ("forward", "backward")]
    forward, backward = (one.score(run, task, query) for one in orders)
    assert torch.allclose(forward.values, backward.values, rtol=1e-9, atol=1e-13)
    plain, free = lo.score([lo.SGDIE(kinks=True), lo.ACC("free", kinks=True)], run, task, query)
    assert (plain.method, free.method) == ("SGD-IE(kinks)", "ACC(free, kinks)")
    assert torch.allclose(plain.values, lo.SGDIE(kinks=True).score(run, task, query).values, rtol=1e-9, atol=1e-13)
    without, other = lo.score([lo.SGDIE(), lo.ACC("free", kinks=True)], run, task, query)
    assert without.method == "SGD-IE"
    assert not torch.allclose(without.values, plain.values)
    assert torch.equal(other.values, free.values)
    rank = sum(p.numel() for p in task.model.parameters())
    whole = lo.ACC(lo.Subspace(rank), kinks=True).score(run, task, query)
    exact = lo.ACC("exact", kinks=True).score(run, task, query)
    assert torch.allclose(whole.values, exact.values, rtol=1e-6, atol=1e-10)


def test_smooth_models_have_no_kinks():
    task = task_of(functional.gelu, trace=False)
    params = {n: p.detach() for n, p in task.parameters().items()}
    vectors = {n: torch.randn(2, *p.shape, dtype=p.dtype) for n, p in params.items()}
    batch = task.read(range(EXAMPLES))
    pair = [kind(task.objective, params, batch).pull(vectors)[0] for kind in (Hessian, KinkedHessian)]
    assert all(torch.equal(pair[0][n], pair[1][n]) for n in params)


def test_stop_gradients_stop_as_before():
    """A network with a stop-gradient: the mode's own constants must not be let through."""
    torch.manual_seed(0)

    class Stopped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x):
            h = torch.relu(self.first(x))
            return self.last(h * h.detach())

    data = TensorDataset(torch.randn(6, 4, dtype=torch.float64), torch.randint(2, (6,)))
    task = lo.Task(Stopped().double(), nn.CrossEntropyLoss(), data)
    assert task.objective.abilities.changes is Form.THROUGH
    params = {n: p.detach() for n, p in task.parameters().items()}
    vectors = {n: torch.randn(2, *p.shape, dtype=p.dtype) for n, p in params.items()}
    batch = task.read(range(6))
    curvature = KinkedHessian(task.objective, params, batch)
    curved = curvature.pull(vectors)[0]
    ones = torch.ones(2, 6, dtype=torch.float64)
    pushed = curvature.push(vectors, ones, 0 * ones)[0]
    # ⟨a, Jᵀb⟩ = ⟨Ja, b⟩ with the same J, which is not symmetric.
    left = flattened(pushed)[0] @ flattened(vectors)[1]
    assert math.isclose(left, flattened(curved)[1] @ flattened(vectors)[0], rel_tol=1e-9)
    plain = Hessian(task.objective, params, batch).pull(vectors)[0]
    assert not torch.allclose(flattened(curved), flattened(plain))


def test_the_size_of_kinks_is_that_of_dense_matrices(recorded):
    """‖α (H_kinks − H)‖, by dense matrices; power iteration comes close to it from below."""
    run, task, states = recorded
    x, y = task.train_set.tensors
    sizes = []
    for model, ids in states:
        pair = [dense(model, x[ids], y[ids], [(0, jump)])[0].mean(0) for jump in (0.8, 0.0)]
        sizes.append(float(torch.linalg.matrix_norm(0.3 * (pair[0] - pair[1]), 2)))
    measured = kink_size(Trajectory(run, task))
    assert np.quantile(sizes, 0.25) * 0.5 < measured <= np.quantile(sizes, 0.25) * (1 + 1e-6)  # few steps: all of them
    one = kink_size(Trajectory(run.head(1), task))
    assert 0.5 * sizes[0] < one <= sizes[0] * (1 + 1e-9)


def test_auto_is_with_kinks_where_they_are_mild_and_without_where_not(recorded, monkeypatch):
    run, task, _ = recorded
    query = TensorDataset(torch.randn(3, FEATURES, dtype=torch.float64), torch.randint(2, (3,)))
    for limit, kinks in ((math.inf, True), (0.0, False)):
        monkeypatch.setattr(kink_module, "LARGEST", limit)
        for estimator in (lo.SGDIE, lo.ACC):
            auto = estimator(kinks="auto").score(run, task, query)
            assert "kinks auto" in auto.method
            assert torch.equal(auto.values, estimator(kinks=kinks).score(run, task, query).values)
    with pytest.raises(lo.InputError) as error:
        lo.SGDIE(kinks="sometimes")
    assert error.value.code == "kinks-unknown"


def test_models_without_kinks_have_no_size_of_them(tmp_path):
    task = task_of(functional.gelu, trace=False)
    run = lo.train(task, torch.optim.SGD(task.model.parameters(), lr=0.1), 1, 5, 0, tmp_path / "run")
    assert kink_size(Trajectory(run, task)) is None
    assert not are_mild(Trajectory(run, task))
