"""A penalty that the loop adds to the loss of each step belongs to no example: it stays when examples leave.

Everything is compared in float64 with plain loops and dense matrices that use nothing of the package.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

import leaveout as lo
from refusal import refused

COUNT, LEFT_OUT = 10, [0, 3, 7]
BATCHES = [part.tolist() for seed in range(3) for part in torch.randperm(
    COUNT, generator=torch.Generator().manual_seed(seed)).split(4)]  # fmt: skip
RATE, CLIP = 0.1, 0.4


def penalty(params: dict[str, Tensor]) -> Tensor:
    """Not quadratic, and not a sum over parameters."""
    squares = sum(p.square().sum() for p in params.values())
    return 0.1 * squares + 0.05 * squares.square() + 0.1 * (params["0.weight"].cos().sum() * params["2.bias"].sum())


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def data(count: int = COUNT, seed: int = 0) -> TensorDataset:
    order = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 3, generator=order).double(), torch.randint(2, (count,), generator=order))


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, RATE),
    "momentum": lambda params: torch.optim.SGD(params, RATE, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, RATE, eps=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.03, eps=1e-1),
}
CASES = [(name, clip) for name in OPTIMIZERS for clip in (False, True)]


def train(name: str, clip: bool, weights: Tensor | None = None, path=None):
    """Train by a plain loop with a weight for every example; with a path, record it."""
    model, (x, y) = new_model(), data().tensors
    optimizer = OPTIMIZERS[name](model.parameters())
    weights = torch.ones(COUNT).double() if weights is None else weights
    recorder = lo.Recorder(path, model, optimizer) if path else None
    for ids in BATCHES:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x[ids]), y[ids], reduction="none")
        (((weights[ids] * losses).mean()) + penalty(dict(model.named_parameters()))).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if recorder:
            recorder.step(ids, [x[ids], y[ids]])
        optimizer.step()
    return (model, recorder.finish()) if recorder else model


def without(example: int, weight: float = 0.0) -> Tensor:
    weights = torch.ones(COUNT).double()
    weights[example] = weight
    return weights


def query_loss(model: nn.Module) -> float:
    x, y = data(5, 9).tensors
    return F.cross_entropy(model(x), y).item()


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}{'-clipped' * case[1]}")
def case(request, tmp_path_factory):
    name, clip = request.param
    model, run = train(name, clip, path=tmp_path_factory.mktemp("penalty") / "run")
    task = lo.Task(model, nn.CrossEntropyLoss(), data(), penalty=penalty, clip_norm=CLIP if clip else None)
    return name, clip, run, task


def scored(case, estimator, **asked) -> Tensor:
    return estimator.score(case[2], case[3], data(5, 9), **asked).mean()


def test_replay_keeps_the_penalty_and_the_query_has_none(case) -> None:
    name, clip, *_ = case
    base = query_loss(train(name, clip))
    truth = [query_loss(train(name, clip, without(k))) - base for k in LEFT_OUT]
    assert scored(case, lo.Replay(), ids=LEFT_OUT).tolist() == pytest.approx(truth, abs=1e-9)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sgdie_is_the_derivative_in_the_weight(case, direction) -> None:
    name, clip, *_ = case
    slopes = [
        -(query_loss(train(name, clip, without(k, 1 + 1e-5))) - query_loss(train(name, clip, without(k, 1 - 1e-5))))
        / 2e-5
        for k in LEFT_OUT
    ]
    values = scored(case, lo.SGDIE(direction=direction), ids=LEFT_OUT)
    assert values.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-8)


def flat_penalty_step(name: str, clip: bool, like: nn.Module):
    """Return a plain step on the flat state (θ, and Adam's or momentum's own) as a function of weights and step."""
    shapes = {n: p.shape for n, p in like.named_parameters()}
    sizes, (x, y) = [p.numel() for p in like.parameters()], data().tensors
    width = sum(sizes)

    def loss(theta: Tensor, ids: list[int], weights: Tensor) -> Tensor:
        params = {n: t.view(shapes[n]) for n, t in zip(shapes, theta.split(sizes), strict=True)}
        losses = F.cross_entropy(functional_call(like, params, x[ids]), y[ids], reduction="none")
        return (weights[ids] * losses).mean() + penalty(params)

    def step(state: Tensor, weights: Tensor, number: int) -> Tensor:
        theta, *own = state.split(width)
        g = grad(loss)(theta, BATCHES[number], weights)
        if clip:
            g = g * (CLIP / (g.norm() + 1e-6)).clamp(max=1.0)
        if name == "sgd":
            return theta - RATE * g
        if name == "momentum":
            g = g + 0.1 * theta
            m = 0.9 * own[0] + g if number else g
            return torch.cat([theta - RATE * m, m])
        m, v = 0.9 * own[0] + 0.1 * g, 0.999 * own[1] + 0.001 * g * g
        root = (v / (1 - 0.999 ** (number + 1))).sqrt()
        return torch.cat([theta - RATE * m / (1 - 0.9 ** (number + 1)) / (root + 1e-2), m, v])

    return step, width


def exact_acc(name: str, clip: bool, example: int) -> float:
    """δ ← ∂F(s; w without the example)·δ + F(s; without) − F(s; w), with dense matrices."""
    model = new_model()
    step, width = flat_penalty_step(name, clip, model)
    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    slots = {"sgd": 0, "momentum": 1, "adam": 2}[name]
    state = torch.cat([theta, torch.zeros(slots * width).double()])
    moved, every = torch.zeros_like(state), torch.ones(COUNT).double()
    for number, ids in enumerate(BATCHES):
        own = without(example) if example in ids else every
        after = step(state, every, number)
        moved = jacobian(lambda s: step(s, own, number), state) @ moved + step(state, own, number) - after  # noqa: B023
        state = after.detach()
    nn.utils.vector_to_parameters(state[:width], model.parameters())
    x, y = data(5, 9).tensors
    slope = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return float(nn.utils.parameters_to_vector(slope) @ moved[:width])


def test_exact_acc_equals_dense_matrices(case) -> None:
    name, clip, *_ = case
    if name == "rmsprop":
        pytest.skip("two directions are compared for it below")
    truth = [exact_acc(name, clip, k) for k in LEFT_OUT]
    for direction in ("forward", "backward"):
        values = scored(case, lo.ACC(transport="exact", direction=direction), ids=LEFT_OUT)
        assert values.tolist() == pytest.approx(truth, rel=1e-7, abs=1e-10)


@pytest.mark.parametrize("method", [lo.ACC(transport="exact"), lo.TracIn()])
def test_forward_and_backward_agree(case, method) -> None:
    forward, backward = (scored(case, replace(method, direction=d)) for d in ("forward", "backward"))
    assert forward.tolist() == pytest.approx(backward.tolist(), rel=1e-8, abs=1e-11)


def test_acc_as_it_is_called_is_nearer_to_exact_acc_than_sgdie(case) -> None:
    exact, plain, own = (scored(case, m) for m in (lo.ACC(transport="exact"), lo.SGDIE(), lo.ACC()))
    assert (own - exact).norm() < (plain - exact).norm()


def test_a_subspace_of_all_directions_is_exact(case) -> None:
    name, clip, *_ = case
    if clip or name not in ("sgd", "momentum"):
        pytest.skip("not linear in the gradient")
    exact, whole = (scored(case, lo.ACC(transport=t)) for t in ("exact", lo.Subspace(20)))
    assert whole.tolist() == pytest.approx(exact.tolist(), rel=1e-6, abs=1e-10)


def test_chosen_layers_move_alone_with_the_others_in_the_penalty(case) -> None:
    name, clip, run, task = case
    if clip or name != "sgd":
        pytest.skip("one optimizer is enough")
    x, y = data().tensors
    query, head = data(5, 9).tensors, ["2.weight", "2.bias"]
    model = new_model()
    params = {n: p.detach().clone() for n, p in model.named_parameters()}

    def loss(own: dict, weights: Tensor, ids: list[int], others: dict) -> Tensor:
        whole = {**others, **own}
        losses = F.cross_entropy(functional_call(model, whole, x[ids]), y[ids], reduction="none")
        return (weights[ids] * losses).mean() + penalty(whole)

    def flat(own: dict) -> Tensor:
        return torch.cat([own[n].flatten() for n in head])

    def step(theta: Tensor, weights: Tensor, ids: list[int], at: dict) -> Tensor:
        own = dict(zip(head, (theta[:6].view(2, 3), theta[6:]), strict=True))
        return theta - RATE * flat(grad(loss)(own, weights, ids, at))

    moved, every = torch.zeros(8).double(), torch.ones(COUNT).double()
    for ids in BATCHES:
        at, theta = dict(params), flat(params)
        push = jacobian(lambda w: step(theta, w, ids, at), every)[:, LEFT_OUT[0]]  # noqa: B023
        moved = jacobian(lambda t: step(t, every, ids, at), theta) @ moved - push  # noqa: B023
        slopes = grad(loss)(params, every, ids, {})
        params = {n: p - RATE * slopes[n] for n, p in params.items()}
    slopes = grad(lambda own: F.cross_entropy(functional_call(model, own, query[0]), query[1]))(params)
    for direction in ("forward", "backward"):
        method = lo.SGDIE(layers="2.*", direction=direction)
        value = method.score(run, task, data(5, 9), ids=LEFT_OUT[:1]).mean()
        assert float(value) == pytest.approx(float(flat(slopes) @ moved), rel=1e-8)


def test_influence_functions_have_its_curvature(case) -> None:
    name, clip, run, task = case
    if clip or name != "sgd":
        pytest.skip("one optimizer is enough")
    model, (x, y) = task.model, data().tensors
    shapes, sizes = {n: p.shape for n, p in model.named_parameters()}, [p.numel() for p in model.parameters()]

    def unflat(theta: Tensor) -> dict[str, Tensor]:
        return {n: t.view(shapes[n]) for n, t in zip(shapes, theta.split(sizes), strict=True)}

    def losses(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, unflat(theta), x), y, reduction="none")

    theta = torch.cat([p.flatten() for p in run.final()["param"].values()])
    hessian = torch.func.hessian(lambda t: losses(t, x, y).mean() + penalty(unflat(t)))(theta)
    slope = grad(lambda t: losses(t, *data(5, 9).tensors).mean())(theta)
    own = vmap(grad(lambda t, x, y: losses(t, x[None], y[None])[0]), (None, 0, 0))(theta, x, y) / COUNT
    method = lo.InfluenceFunction(damping=0.5)
    truth = own @ torch.linalg.solve(hessian + 0.5 * torch.eye(len(theta)).double(), slope)
    assert scored(case, method).tolist() == pytest.approx(truth.tolist(), rel=1e-6)


def test_a_task_without_the_penalty_is_refused(case) -> None:
    with refused(lo.MismatchError, "step-does-not-follow", "penalty"):
        task = lo.Task(case[3].model, nn.CrossEntropyLoss(), data(), clip_norm=CLIP if case[1] else None)
        lo.SGDIE().score(case[2], task, data(5, 9))


def test_the_built_in_loop_trains_with_it(tmp_path) -> None:
    model = new_model()
    task = lo.Task(model, nn.CrossEntropyLoss(), data(), penalty=penalty)
    run = lo.train(task, torch.optim.SGD(model.parameters(), RATE), 2, 4, 0, tmp_path / "run")
    assert lo.Replay().score(run, task, data(5, 9), ids=[1]).values.abs().max() > 0


@pytest.mark.parametrize(
    "wrong", [lambda params: params["0.bias"], lambda _: 0.5, lambda params: params["unknown"].sum()]
)
def test_what_is_no_number_is_refused(wrong) -> None:
    with refused(lo.InputError, "penalty-not-a-number", "penalty="):
        lo.Task(new_model(), nn.CrossEntropyLoss(), data(), penalty=wrong)
