"""Many query vectors on large models, one by one on each thread: the derivatives of training, and nothing lost."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo
from leaveout.sweep import budget
from leaveout.task.trace.stages import stages
from leaveout.task.trace.tracer import Tracer
from problems import tiny_gpt

QUERIES = 4


@pytest.fixture
def one_by_one(monkeypatch):
    """Small models treated as large ones are, on two threads."""
    monkeypatch.setattr(budget, "LARGE", 0)
    monkeypatch.setattr(budget, "TRACED", 0)
    monkeypatch.setattr(budget, "cores", lambda _device: 2)


def text():
    return *tiny_gpt(), lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3)


def images(*layers):
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    body = layers or (nn.Tanh(),)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), *body, nn.Flatten(), nn.Linear(48, 3)).double()
    x = torch.randn(20, 1, 6, 6, generator=draw).double()
    make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)  # noqa: E731
    return model, TensorDataset(x, torch.randint(3, (20,), generator=draw)), make


def normalised():
    return images(nn.BatchNorm2d(3), nn.Tanh(), nn.Dropout(0.2))


def kinked():
    return images(nn.ReLU())


def first(data, count):
    return TensorDataset(*(leaf[:count] for leaf in data.tensors))


def trained(tmp_path, problem):
    model, data, make = problem()
    torch.manual_seed(1)
    optimizer, loss = make(model.parameters()), nn.CrossEntropyLoss()
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for _ in range(2):
        for x, y in recorder.watch(DataLoader(data, batch_size=4, shuffle=True)):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return recorder.finish(), lo.Task(model, loss, data), first(data, QUERIES)


def weighted(run, problem, example, weight):
    """The queries' losses after an ordinary loop in which one example's loss has another weight."""
    model, data, make = problem()
    optimizer = make(model.parameters())
    x, y = data.tensors
    for index in range(len(run)):
        ids = run.record(index).ids
        losses = nn.functional.cross_entropy(model(x[ids]), y[ids], reduction="none").reshape(len(ids), -1).mean(1)
        optimizer.zero_grad()
        losses = torch.where(ids == example, weight * losses, losses)
        losses.mean().backward()
        optimizer.step()
    with torch.no_grad():
        losses = nn.functional.cross_entropy(model(x[:QUERIES]), y[:QUERIES], reduction="none")
    return losses.reshape(QUERIES, -1).mean(1)


@pytest.mark.parametrize("problem", [text, images])
def test_scores_of_each_query_are_derivatives_of_training(tmp_path, one_by_one, problem):
    run, task, query = trained(tmp_path, problem)
    scores = lo.SGDIE().score(run, task, query, queries="each")
    for example in (0, 7, 19):
        less, more = (weighted(run, problem, example, 1 + h) for h in (-1e-4, 1e-4))
        expected = (less - more) / 2e-4
        torch.testing.assert_close(scores.values[example], expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("problem", [text, images, normalised, kinked])
@pytest.mark.parametrize(
    "estimator",
    [lo.SGDIE(), lo.SGDIE(readout="outputs"), lo.ACC(), lo.SGDIE(kinks=True), lo.SGDIE(layers="*weight")],
    ids=repr,
)
def test_one_by_one_they_are_what_they_are_together(tmp_path, monkeypatch, problem, estimator):
    run, task, query = trained(tmp_path, problem)
    together = estimator.score(run, task, query, queries="each")
    monkeypatch.setattr(budget, "LARGE", 0)
    monkeypatch.setattr(budget, "TRACED", 0)
    apart = estimator.score(run, task, query, queries="each")
    assert together.cost.hvps == apart.cost.hvps
    torch.testing.assert_close(apart.values, together.values, rtol=1e-8, atol=1e-12)


def test_micro_batches_one_by_one(tmp_path, monkeypatch):
    model, data, make = normalised()
    optimizer, loss = make(model.parameters()), nn.CrossEntropyLoss()
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for number, (x, y) in enumerate(recorder.watch(DataLoader(data, batch_size=5, shuffle=True))):
        (loss(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    run, task = recorder.finish(), lo.Task(model, loss, data, accumulation=2)
    together = lo.SGDIE().score(run, task, first(data, 2), queries="each")
    monkeypatch.setattr(budget, "LARGE", 0)
    monkeypatch.setattr(budget, "TRACED", 0)
    apart = lo.SGDIE().score(run, task, first(data, 2), queries="each")
    torch.testing.assert_close(apart.values, together.values, rtol=1e-8, atol=1e-12)


def test_threads_change_no_bit_and_budgets_nothing_but_rounding(tmp_path, one_by_one, monkeypatch):
    run, task, query = trained(tmp_path, text)
    two = lo.SGDIE().score(run, task, query, queries="each")
    monkeypatch.setattr(budget, "cores", lambda _device: 1)
    one = lo.SGDIE().score(run, task, query, queries="each")
    torch.testing.assert_close(one.values, two.values, rtol=1e-12, atol=1e-15)
    monkeypatch.setattr(budget, "cores", lambda _device: 3)
    assert torch.equal(lo.SGDIE().score(run, task, query, queries="each").values, two.values)
    small = lo.Resources(memory=3_000_000)
    within = lo.SGDIE().score(run, task, query, queries="each", resources=small)
    torch.testing.assert_close(within.values, two.values, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("problem", [text, images])
def test_a_step_that_does_not_follow_is_noticed(tmp_path, one_by_one, problem):
    """One that is not among those which are computed again as a whole."""
    model, data, make = problem()
    optimizer, loss = make(model.parameters()), nn.CrossEntropyLoss()
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for number, (x, y) in enumerate(recorder.watch(DataLoader(data, batch_size=4))):
        optimizer.zero_grad()
        (loss(model(x), y) * (3 if number == 2 else 1)).backward()
        optimizer.step()
    run, task = recorder.finish(), lo.Task(model, loss, data)
    with pytest.raises(lo.MismatchError, match="Step 2") as caught:
        lo.SGDIE().score(run, task, first(data, QUERIES), queries="each")
    assert caught.value.code == "step-does-not-follow"


def test_what_does_not_depend_on_the_later_inputs_is_computed_first():
    def function(a, b, c):
        shared = (a * b).exp()
        return [shared * c, (shared + 1) @ c, a + b]

    inputs = list(torch.randn(3, 8, 8).unbind())
    module = make_fx(function)(*inputs)
    before, after = stages(module, 2)
    targets = [[node.target for node in part.graph.nodes if node.op == "call_function"] for part in (before, after)]
    aten = torch.ops.aten
    assert set(targets[0]) == {aten.mul.Tensor, aten.exp.default, aten.add.Tensor}
    assert set(targets[1]) == {aten.mul.Tensor, aten.mm.default}
    assert all(map(torch.equal, after(*before(*inputs[:2]), inputs[2]), function(*inputs)))


def test_what_is_shared_survives_every_call():
    """Operations in place must not write over what the next vector needs."""
    torch.manual_seed(0)
    a, b, *others = torch.randn(5, 64, 64).unbind()

    def function(a, b, c):
        shared = (a @ b).exp()
        return {"product": (shared * c + 1).tanh() * shared, "shared": shared}

    call = Tracer().staged("function", function, (a, b), (others[0],))
    for c in (*others, others[0]):
        result = call(c)
        assert torch.equal(result["product"], function(a, b, c)["product"])
        result["shared"].zero_()  # whoever gets it may write to it


def test_what_cannot_be_traced_is_not_staged():
    tracer = Tracer()

    def function(a, b):
        return a * b if float(a.sum()) > 0 else a

    a = torch.ones(3)
    assert tracer.staged("function", function, (a,), (a,)) is None
    assert Tracer(never=True).staged("function", lambda a, b: a * b, (a,), (a,)) is None
