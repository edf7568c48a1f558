"""Metasmoothness against plain retraining with weighted examples, and its sentence on runs that differ."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.evaluate import smoothness as module
from problems import shared


def weighted(problem, weights: torch.Tensor) -> torch.Tensor:
    """The end of the recorded run under example weights, by plain PyTorch, as one vector."""
    names = list(problem.run.state(0)["param"])
    params = {name: tensor.clone() for name, tensor in problem.run.state(0)["param"].items()}
    x, y = problem.train.tensors
    for step in range(len(problem.run)):
        ids = problem.run.record(step).ids
        params = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
        out = torch.func.functional_call(problem.task.model, params, (x[ids],))
        each = nn.functional.binary_cross_entropy_with_logits(out, y[ids], reduction="none")
        grads = torch.autograd.grad((weights[ids] * each).mean(), [params[name] for name in names])
        for name, g in zip(names, grads, strict=True):
            params[name] = params[name] - (0.2 if g.ndim == 1 else 0.3) * 0.97**step * g
    return torch.cat([params[name].detach().flatten() for name in names])


def test_metasmoothness_is_that_of_plain_retraining():
    problem = shared("mlp", n=12)
    h = 0.4
    measured = lo.smoothness(problem.run, problem.task, directions=3, h=h, seed=7)
    signs = torch.randint(2, (3, 12), generator=torch.Generator().manual_seed(7)) * 2.0 - 1
    base = weighted(problem, torch.ones(12).double())
    for v, agreement in zip(signs.double(), measured.per_direction, strict=True):
        first, second = weighted(problem, 1 + h * v), weighted(problem, 1 + 2 * h * v)
        a, b = first - base, second - first
        assert agreement == pytest.approx(float((a.abs() * a.sign() * b.sign()).sum() / a.abs().sum()), abs=1e-10)
    assert measured.agreement == pytest.approx(sum(measured.per_direction) / 3)
    assert lo.smoothness(problem.run, problem.task, directions=1).per_direction == pytest.approx(
        lo.smoothness(problem.run, problem.task, directions=1, h=1 / math.sqrt(12)).per_direction
    )


def test_growth_is_that_of_a_vector_carried_back_by_dense_steps(tmp_path):
    """One weight, one example, f(a) = a⁴/4 − a²/2 at a = 0: H = −1, so each step multiplies a vector by 1 + lr."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    data = TensorDataset(torch.ones(2, 1).double(), torch.tensor([1.0, -1.0]).double())
    loss = lambda out, y: -(out[:, 0] ** 2) / 2 + out[:, 0] ** 4 / 4 + 1e-3 * y * out[:, 0]  # noqa: E731
    task = lo.Task(model, loss, data, check=False)
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.3), 4, 2, 0, tmp_path / "run")
    measured = lo.smoothness(run, task, directions=1, h=1e-3)
    assert measured.growth == pytest.approx(1.3**3, rel=1e-3)  # from the first vector seen to the last
    assert measured.steps == (0, 3)


def trained(path, activation: type[nn.Module], lr: float, kind=torch.optim.SGD, batch: int = 20):
    torch.manual_seed(0)
    x = torch.randn(60, 8)
    model = nn.Sequential(nn.Linear(8, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, 2)).double()
    y = (x[:, 0] * x[:, 1] > 0).long()
    task = lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(x.double(), y), check=False)
    return lo.train(task, kind(model.parameters(), lr=lr), 10, batch, 0, path), task


def test_the_sentence_tells_a_smooth_run_from_one_that_is_not(tmp_path):
    smooth = lo.smoothness(*trained(tmp_path / "a", nn.Tanh, 0.05))
    assert smooth.smooth
    assert "linearised scores can hold" in str(smooth)
    assert "train with" not in str(smooth)
    rough = lo.smoothness(*trained(tmp_path / "b", nn.ReLU, 3.0))
    assert rough.agreement < module.ROUGH
    assert not rough.smooth
    assert "not smooth" in str(rough)
    assert rough.advice == tuple(word for word in module.ORDER if word != module.EPS)
    assert f"train with {rough.advice[0]}" in str(rough)


def test_advice_is_of_what_can_be_changed(tmp_path):
    adam = lo.smoothness(*trained(tmp_path / "a", nn.Tanh, 0.01, torch.optim.Adam, batch=60), directions=1)
    assert set(adam.advice) == {module.RATE, module.DECAY, module.EPS}


@pytest.mark.parametrize(
    ("option", "code"), [({"directions": 0}, "directions-not-a-count"), ({"h": 0}, "weight-step-out-of-range")]
)
def test_what_cannot_be_measured_is_refused(option, code):
    problem = shared("mlp", n=12)
    with pytest.raises(lo.InputError) as error:
        lo.smoothness(problem.run, problem.task, **option)
    assert error.value.code == code


def test_a_training_that_does_not_move_is_not_called_rough(tmp_path):
    run, task = trained(tmp_path / "run", nn.Tanh, 0.0)
    measured = lo.smoothness(run, task)
    assert str(measured).startswith("The weights of the examples change nothing in this training")
    assert not measured.smooth
