"""Kinks under optimizers that divide by a root: compared with a recurrence written out with dense matrices."""

import copy

import pytest
import torch
from torch import nn
from torch.func import jvp
from torch.nn import functional
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.sweep.leaps import LEAP
from test_kinks import EXAMPLES, FEATURES, dense, task_of

RATE, BETA, SQUARE_BETA, EPS = 0.05, 0.8, 0.9, 1e-3


def adam(theta, mean, square, gradient, count):
    """One step of Adam, as its publication writes it."""
    mean, square = BETA * mean + (1 - BETA) * gradient, SQUARE_BETA * square + (1 - SQUARE_BETA) * gradient**2
    root = (square / (1 - SQUARE_BETA**count)).sqrt() + EPS
    return theta - RATE * mean / (1 - BETA**count) / root, mean, square


def rmsprop(theta, mean, square, gradient, count):
    """One step of RMSprop, without a mean."""
    square = SQUARE_BETA * square + (1 - SQUARE_BETA) * gradient**2
    return theta - RATE * gradient / (square.sqrt() + EPS), mean, square


OPTIMIZERS = {
    "Adam": (adam, lambda params: torch.optim.Adam(params, lr=RATE, betas=(BETA, SQUARE_BETA), eps=EPS)),
    "RMSprop": (rmsprop, lambda params: torch.optim.RMSprop(params, lr=RATE, alpha=SQUARE_BETA, eps=EPS)),
}


@pytest.fixture(scope="module", params=OPTIMIZERS)
def recorded(request, tmp_path_factory):
    """A small network; each example is met three times."""
    step, make = OPTIMIZERS[request.param]
    task = task_of(lambda x: functional.leaky_relu(x, 0.2))
    x, y = task.train_set.tensors
    optimizer = make(task.model.parameters())
    recorder = lo.Recorder(tmp_path_factory.mktemp("leaps") / "run", task.model, optimizer)
    models, order = [], torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(1))
    for epoch in range(3):
        for ids in order.roll(epoch).split(5 if epoch else 4):
            models.append((copy.deepcopy(task.model), ids))
            optimizer.zero_grad()
            functional.cross_entropy(task.model(x[ids]), y[ids]).backward()
            recorder.step(ids, [x[ids], y[ids]], epoch=epoch)
            optimizer.step()
    return recorder.finish(), task, models, step


def oracle(task, models, step, accumulative):
    """δ of every example: the whole state is carried forward, and leaps of the gradient count in part."""
    x, y = task.train_set.tensors
    sizes = [param.numel() for param in task.model.parameters()]
    zero = torch.zeros(sum(sizes), dtype=torch.float64)
    mean, square = zero, zero
    moved = [(zero, zero, zero) for _ in range(EXAMPLES)]
    for count, (model, ids) in enumerate(models, start=1):
        matrices, gradients = dense(model, x[ids], y[ids], [(0, 0.8)])
        theta = torch.cat([param.detach().flatten() for param in model.parameters()])
        whole = gradients.mean(0)

        def after(theta, mean, square, gradient, count=count):
            return step(theta, mean, square, gradient, count)

        recorded_after = after(theta, mean, square, whole)
        levels = torch.cat([part.mean().expand(len(part)) for part in recorded_after[2].split(sizes)])
        counts = (recorded_after[2] / (recorded_after[2] + LEAP**2 * levels)).sqrt()
        for k in range(EXAMPLES):
            inside = [place for place, other in enumerate(ids.tolist()) if other == k]
            left = gradients[inside].sum(0) / len(ids)
            curved = matrices.mean(0) @ moved[k][0]
            if accumulative:
                curved = curved - matrices[inside].sum(0) @ moved[k][0] / len(ids)
                at = whole - left
                jump = [b - a for a, b in zip(recorded_after, after(theta, mean, square, at), strict=True)]
                along = counts * curved
            else:
                at, jump, along = whole, [zero, zero, zero], counts * curved - left
            tangent = jvp(after, (theta, mean, square, at), (*moved[k], along))[1]
            moved[k] = tuple(a + b for a, b in zip(tangent, jump, strict=True))
        _, mean, square = recorded_after
    return torch.stack([one[0] for one in moved])


@pytest.mark.parametrize("queries", ["mean", "each"])
@pytest.mark.parametrize("accumulative", [False, True])
def test_leaps_count_as_far_as_they_can_move_a_step(recorded, accumulative, queries):
    run, task, models, step = recorded
    query = TensorDataset(torch.randn(3, FEATURES, dtype=torch.float64), torch.randint(2, (3,)))
    losses = functional.cross_entropy(task.model(query.tensors[0]), query.tensors[1], reduction="none")
    slopes = []
    for value in [losses.mean()] if queries == "mean" else losses:
        parts = torch.autograd.grad(value, list(task.model.parameters()), retain_graph=True)
        slopes.append(torch.cat([part.flatten() for part in parts]))
    wanted = oracle(task, models, step, accumulative) @ torch.stack(slopes).T
    for direction in ("forward", "backward"):
        estimator = (
            lo.ACC("exact", direction=direction, kinks=True)
            if accumulative
            else lo.SGDIE(direction=direction, kinks=True)
        )
        scores = estimator.score(run, task, query, queries=queries)
        assert torch.allclose(scores.values, wanted, rtol=1e-7, atol=1e-11)


def test_the_jump_is_carried_by_the_same_vector(recorded):
    """Its plain part is SGD-IE's, and it differs from the jump without kinks."""
    run, task, *_ = recorded
    query = TensorDataset(torch.randn(3, FEATURES, dtype=torch.float64), torch.randint(2, (3,)))
    plain, jump = lo.score([lo.SGDIE(kinks=True), lo.ACC("jump", kinks=True)], run, task, query)
    assert torch.allclose(plain.values, lo.SGDIE(kinks=True).score(run, task, query).values, rtol=1e-9, atol=1e-13)
    alone = lo.ACC("jump", kinks=True).score(run, task, query)
    assert torch.allclose(jump.values, alone.values, rtol=1e-9, atol=1e-13)
    assert (jump.values - lo.ACC("jump").score(run, task, query).values).abs().max() > 1e-6


def test_a_smooth_model_has_the_same_scores_with_and_without_kinks(tmp_path):
    task = task_of(functional.gelu)
    run = lo.train(task, torch.optim.Adam(task.model.parameters(), lr=0.05), 2, 5, 0, tmp_path / "run")
    for estimator in (lo.SGDIE, lo.ACC):
        with_kinks, without = (
            estimator(kinks=kinks).score(run, task, task.train_set).values for kinks in (True, False)
        )
        assert torch.equal(with_kinks, without)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_with_batch_norm_and_clipping_both_directions_are_one(tmp_path, clip):
    """There examples leave the batch's statistics too, which is read without kinks."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)]
    model = nn.Sequential(*layers).double()
    train_set, query = (
        TensorDataset(torch.randn(size, 5, dtype=torch.float64), torch.randint(3, (size,))) for size in (24, 6)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for _ in range(3):
        for x, y in recorder.watch(torch.utils.data.DataLoader(train_set, batch_size=6, shuffle=True)):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    run, task = recorder.finish(), lo.Task(model, nn.CrossEntropyLoss(), train_set, clip_norm=clip)
    forward, backward = (
        lo.SGDIE(direction=direction, kinks=True).score(run, task, query).values
        for direction in ("forward", "backward")
    )
    each = lo.SGDIE(kinks=True).score(run, task, query, queries="each").values.mean(1, keepdim=True)
    assert torch.allclose(forward, backward, rtol=1e-6, atol=1e-9 * float(backward.abs().max()))
    assert torch.allclose(each, backward, rtol=1e-6, atol=1e-9 * float(backward.abs().max()))
    assert not torch.allclose(lo.SGDIE().score(run, task, query).values, backward, rtol=1e-3)
