"""Traced products equal the functions they were traced from, for the layers and losses that people use."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.diff import operator as products
from leaveout.diff.hessian import Hessian
from leaveout.task import batches
from leaveout.task.trace import tracer as tracing
from leaveout.task.trace.tracer import Tracer
from problems import call_traced, mostly_full
from refusal import refused

BODIES = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
    "leaky": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "softmax": lambda: nn.Softmax(-1),
    "layernorm": lambda: nn.LayerNorm(8),
    "groupnorm": lambda: nn.Sequential(nn.Unflatten(1, (4, 2)), nn.GroupNorm(2, 4), nn.Flatten()),
    "conv1d": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(16, 8)
    ),
    "maxpool": lambda: nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 8)),
    "avgpool": lambda: nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, 8)),
    "batchnorm": lambda: nn.BatchNorm1d(8).eval(),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Flatten()
    ),
}

LOSSES = {
    "mse": (nn.MSELoss, "real"),
    "l1": (nn.L1Loss, "real"),
    "huber": (nn.HuberLoss, "real"),
    "smooth": (nn.SmoothL1Loss, "real"),
    "bce": (nn.BCEWithLogitsLoss, "probability"),
    "cross": (nn.CrossEntropyLoss, "class"),
    "smoothed": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), "class"),
    "poisson": (nn.PoissonNLLLoss, "probability"),
    "softmargin": (nn.SoftMarginLoss, "sign"),
}


def task_of(body, loss, kind):
    model = nn.Sequential(nn.Linear(5, 8), body, nn.Linear(8, 3)).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    targets = {
        "real": lambda: torch.randn(6, 3, dtype=torch.float64),
        "probability": lambda: torch.rand(6, 3, dtype=torch.float64),
        "sign": lambda: torch.randn(6, 3, dtype=torch.float64).sign(),
        "class": lambda: torch.randint(3, (6,)),
    }
    return lo.Task(model, loss, TensorDataset(x, targets[kind]()))


def calls(task, seed):
    """Every product of the task, by name, at parameters, examples and vectors of this seed."""
    torch.manual_seed(seed)
    params = {name: p.detach() + seed * torch.randn_like(p) for name, p in task.parameters().items()}
    batch, objective = task.read(torch.randperm(6).tolist()), task.objective
    vector = {name: torch.randn_like(p) for name, p in params.items()}
    stack = {name: torch.randn(6, *p.shape, dtype=p.dtype) for name, p in params.items()}
    weights, added = torch.rand(2, 6, 6, dtype=torch.float64)
    operator = Hessian(objective, params, batch)
    found = {
        "gradient": lambda: products.gradient(objective, params, batch),
        "stacked": lambda: products.stacked_gradients(objective, stack, weights, batch),
        "hessian": lambda: operator.pull(stack)[:3],
        "changes": lambda: operator.push(stack, weights, added),
        "weights": lambda: products.reads(objective, params, batch, stack),
        "gradients": lambda: products.example_gradients(objective, params, batch),
        "shared": lambda: operator.example_products(batch, vector),
        "own": lambda: operator.example_products(batch, stack),
    }
    if objective.abilities.forward:
        # The gradient is None where the quickest form goes without it.
        found["one"] = lambda: operator.pull({name: tensor[None] for name, tensor in vector.items()})[:2]
    return found


def check(task):
    """Traced with some inputs, right for them and for others."""
    traced = {}
    for seed in (0, 1):
        eager = {name: batches.leaves(call()) for name, call in calls(task.of(task.objective.untraced()), seed).items()}
        for name, call in calls(task, seed).items():
            for _ in range((tracing.RARE if name == "gradient" else tracing.WARM_UP) + 1):
                traced[name] = batches.leaves(call())
            for a, b in zip(eager[name], traced[name], strict=True):
                assert (a is None and b is None) or torch.equal(a, b), (name, seed)
    assert len(task.objective.execution.tracer._traces) == len(traced)
    return [trace is not None for trace in task.objective.execution.tracer._traces.values()]


@pytest.mark.parametrize("body", mostly_full(BODIES, "batchnorm"))
def test_layers(body):
    task = task_of(BODIES[body](), nn.CrossEntropyLoss(), "class")
    assert task.objective.abilities.vmap
    assert all(check(task))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("loss", mostly_full(LOSSES, "cross"))
def test_losses(loss):
    make, kind = LOSSES[loss]
    assert all(check(task_of(nn.Tanh(), make(), kind)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_loss_without_second_derivatives_is_refused_where_they_are_needed(tmp_path):
    def loss(outputs, targets):  # PyTorch has no second derivative of it
        others = (targets[:, None] + torch.arange(outputs.shape[1])) % outputs.shape[1]
        return nn.functional.multilabel_margin_loss(
            outputs, others.where(others == targets[:, None], -1), reduction="none"
        )

    task = task_of(nn.Tanh(), loss, "class")
    run = lo.train(task, torch.optim.SGD(task.model.parameters(), lr=0.1), 2, 3, 0, tmp_path / "run")
    for estimator in (lo.SGDIE(), lo.ACC(), lo.ACC("exact")):
        with refused(lo.UnsupportedError, "derivative-not-available", "TracIn", "Replay"):
            estimator.score(run, task, task.train_set)
    assert lo.Replay().score(run, task, task.train_set).values.abs().max() > 0
    assert lo.TracIn().score(run, task, task.train_set).values.abs().max() > 0


def test_a_function_that_looks_at_its_values_is_never_traced():
    tracer = Tracer()

    def branching(x):
        return x * 2 if float(x.sum()) > 0 else x * 3

    for sign in (1, -1) * 10:
        x = sign * torch.ones(2)
        assert torch.equal(call_traced(tracer, "branching", branching, x), branching(x))


def test_rare_shapes_are_not_traced():
    tracer = Tracer()
    for n in range(1, 20):
        call_traced(tracer, "double", lambda x: x * 2, torch.ones(n))
    assert not tracer._traces


def test_what_is_computed_twice_is_computed_once():
    module = tracing.make_fx(lambda x: x.sin() * x.sin() + x.detach())(torch.ones(2))
    before = len(module.graph.nodes)
    tracing.simplify(module)
    assert len(module.graph.nodes) == before - 2
    assert torch.equal(module(torch.ones(2)), torch.ones(2).sin() ** 2 + 1)


@pytest.mark.parametrize(
    ("function", "operations"),
    [
        (lambda x: x.t().t() + x, 1),
        (lambda x: x.reshape(6).unsqueeze(0).view(2, 3).exp(), 1),
        (lambda x: x.clone().exp() * 1, 1),
        (lambda x: torch.ones_like(x.exp().log()) / 3 + x, 1),
        (lambda x: x.new_zeros(2, 2) @ x + x.exp(), 1),
        (lambda x: (x - x).square() + x.exp(), 1),
        (lambda x: x.exp() * x.pow(0), 1),
        (lambda x: x.t() + x.t().exp(), 3),
        (lambda x: x.expand(2, 2, 3).sum(0) + 1, 3),
    ],
)
def test_what_has_no_effect_is_dropped(function, operations):
    x, y = torch.arange(6.0).view(2, 3), torch.randn(2, 3)
    module = tracing.make_fx(function)(x)
    tracing.simplify(module)
    assert sum(node.op == "call_function" for node in module.graph.nodes) == operations
    tracing.call_directly(module)
    for given in (x, y):
        assert torch.equal(module(given), function(given))


def test_random_numbers_are_no_constants():
    module = tracing.make_fx(lambda x: x + torch.rand(2))(torch.ones(2))
    tracing.simplify(module)
    assert not torch.equal(module(torch.ones(2)), module(torch.ones(2)))


@pytest.mark.parametrize(
    ("expected", "calls", "small", "made"),
    [
        (None, tracing.WARM_UP + 1, 0, 1),  # nothing is known
        (40, 40, 0, 0),  # too few
        (70, tracing.WARM_UP + 1, 0, 1),  # enough are to come
        (40, 65, 0, 1),  # enough have come, as in several sweeps
        (120, 100, 10, 1),  # each tenth batch is smaller: too rare
    ],
)
def test_traces_are_made_if_they_pay_off(monkeypatch, expected, calls, small, made):
    monkeypatch.setattr(tracing, "PAYS", 64)
    tracer = Tracer()
    if expected:
        tracer.expect(expected)
    for call in range(1, calls + 1):
        x = torch.ones(2 if small and call % small == 0 else 3)
        assert torch.equal(call_traced(tracer, "sine", torch.sin, x), x.sin())
    assert len(tracer._traces) == made


def test_a_sweep_says_how_many_steps_it_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "PAYS", 64)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))
    made = []
    for epochs in (2, 8):  # 20 and 80 steps
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        task = lo.Task(model, nn.CrossEntropyLoss(), data)
        run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.1), epochs, 4, 0, tmp_path / str(epochs))
        lo.SGDIE().score(run, task, data)
        made.append(len(task.objective.execution.tracer._traces))
    assert made[0] == 0 < made[1]


def test_the_same_tensor_given_twice_is_two_inputs():
    """What was traced with one tensor in two places is right for two tensors."""
    tracer, x, y = Tracer(), torch.ones(2), torch.full((2,), 3.0)
    for _ in range(tracing.WARM_UP + 1):
        call_traced(tracer, "difference", torch.sub, x, x)
    assert tracer._traces
    assert torch.equal(call_traced(tracer, "difference", torch.sub, x, y), x - y)


def test_results_have_memory_of_their_own():
    """What is computed once and returned twice, or given and returned, may be written into."""
    tracer, x = Tracer(), torch.ones(3)

    def several(x):
        return x.sin(), x.sin(), torch.zeros(3) + x, torch.ones(3)

    for _ in range(tracing.WARM_UP + 2):
        first, second, third, fourth = call_traced(tracer, "several", several, x)
    assert tracer._traces
    for result in (first, third, fourth):
        result.zero_()
    assert torch.equal(call_traced(tracer, "several", several, x)[3], torch.ones(3))
    assert torch.equal(second, torch.ones(3).sin())
    assert torch.equal(x, torch.ones(3))


class Twins(nn.Module):
    """Two layers with equal gradients."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        return self.a(x) + self.b(x)


def test_parameters_with_equal_gradients_take_their_own_steps(tmp_path):
    """Weight decay makes their steps differ; a replay without the example, and without traces, is the truth."""
    torch.manual_seed(0)
    model = Twins().double()
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 1, dtype=torch.float64)
    task = lo.Task(model, nn.MSELoss(), TensorDataset(x, y))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.3), 4, 4, 0, tmp_path / "run")
    found = lo.Replay().score(run, task.anew(), task.train_set).mean()
    losses = []
    for left in (None, 0):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.3)
        for i in range(len(run)):
            ids = run.record(i).ids
            weights = torch.tensor([float(j != left) for j in ids.tolist()], dtype=torch.float64)
            optimizer.zero_grad()
            ((model(x[ids]) - y[ids]).square()[:, 0] * weights).mean().backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(float(nn.MSELoss()(model(x), y)))
    assert float(found[0]) == pytest.approx(losses[1] - losses[0], abs=1e-12)
