"""Losses in which examples count differently: every method's scores from dense matrices of the training loss itself."""

import pytest
import torch
from torch import nn
from torch.func import grad
from torch.utils.data import TensorDataset

import leaveout as lo

N, BATCH, DAMPING = 18, 6, 0.1
WEIGHT = torch.tensor([1.0, 3.0, 0.2], dtype=torch.float64)
LOSSES = {
    "weighted": nn.CrossEntropyLoss(weight=WEIGHT),
    "ignored": nn.CrossEntropyLoss(ignore_index=2),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
}


@pytest.fixture(scope="module", params=LOSSES)
def problem(request, tmp_path_factory):
    order = torch.Generator().manual_seed(0)
    x, y = torch.randn(N + 5, 4, dtype=torch.float64, generator=order), torch.arange(N + 5) * 7 % 3
    loss = LOSSES[request.param]
    torch.manual_seed(1)
    model = nn.Linear(4, 3).double()
    task = lo.Task(model, loss, TensorDataset(x[:N], y[:N]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    recorder = lo.Recorder(tmp_path_factory.mktemp(request.param) / "run", model, optimizer)
    for epoch in range(2):
        for ids in torch.randperm(N, generator=order).split(BATCH):
            optimizer.zero_grad()
            loss(model(x[ids]), y[ids]).backward()
            recorder.step(ids, [x[ids], y[ids]], epoch=epoch)
            optimizer.step()
    kept = (y[N:] != 2).nonzero().flatten() + N
    return request.param, recorder.finish(), task, TensorDataset(x[kept], y[kept])


def counted(name: str, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor, total: float) -> torch.Tensor:
    """What examples add to the training loss with this denominator."""
    loss = LOSSES[name]
    single = nn.CrossEntropyLoss(weight=loss.weight, ignore_index=loss.ignore_index, reduction="sum")
    return single(x @ theta[:12].view(3, 4).T + theta[12:], y) / total


def denominator(name: str, y: torch.Tensor) -> float:
    """That of all examples as one batch; of a sum, that of the mean batch in an epoch."""
    return {"weighted": float(WEIGHT[y].sum()), "ignored": float((y != 2).sum()), "sum": N / BATCH}[name]


def parameters(state: dict) -> torch.Tensor:
    return torch.cat([state["weight"].flatten(), state["bias"]])


def query_gradient(theta: torch.Tensor, query: TensorDataset) -> torch.Tensor:
    x, y = query.tensors
    return grad(lambda t: nn.functional.cross_entropy(x @ t[:12].view(3, 4).T + t[12:], y))(theta)


def test_influence_functions_are_of_the_training_loss(problem):
    name, run, task, query = problem
    (x, y), theta = task.train_set.tensors, parameters(run.final()["param"])
    total = denominator(name, y)
    hessian = torch.autograd.functional.hessian(lambda t: counted(name, t, x, y, total), theta)
    vector = torch.linalg.solve(hessian + DAMPING * torch.eye(15).double(), query_gradient(theta, query))
    expected = [vector @ grad(lambda t: counted(name, t, x[[k]], y[[k]], total))(theta) for k in range(N)]  # noqa: B023
    for solver in ("direct", "cg"):
        scores = lo.InfluenceFunction(solver, damping=DAMPING).score(run, task, query)
        torch.testing.assert_close(scores.values[:, 0], torch.stack(expected), rtol=1e-7, atol=1e-10)
    moved = lo.InfluenceFunction("direct", damping=DAMPING).score(run, task, query, displacements=True)
    torch.testing.assert_close(moved.values[:, 0], torch.stack(expected), rtol=1e-7, atol=1e-10)


def test_tracin_of_checkpoints_reads_what_examples_count(problem):
    name, run, task, query = problem
    x, y = task.train_set.tensors
    total = denominator(name, y) * BATCH / N  # the mean batch's
    expected = torch.zeros(N, dtype=torch.float64)
    for step in (3, 6):
        theta = parameters(run.state(step)["param"])
        vector = query_gradient(theta, query)
        for k in range(N):
            part = grad(lambda t: counted(name, t, x[[k]], y[[k]], total))(theta)  # noqa: B023
            expected[k] += 0.05 * vector @ part
    scores = lo.TracIn("epochs").score(run, task, query)
    torch.testing.assert_close(scores.values[:, 0], expected, rtol=1e-9, atol=1e-12)
    some = lo.TracIn("epochs").score(run, task, query, ids=[5, 3]).values[:, 0]
    torch.testing.assert_close(some, expected[[5, 3]], rtol=1e-9, atol=1e-12)


def test_dvemb_is_sgdie_where_the_model_is_linear(problem):
    _, run, task, query = problem
    values = [method.score(run, task, query).values for method in (lo.DVEmb(), lo.SGDIE())]
    torch.testing.assert_close(*values, rtol=1e-9, atol=1e-12)
