"""Replays on several threads, each from the first step that uses its example: the models that plain training gives."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.compute.threads import spread
from leaveout.estimators import query
from leaveout.sweep import budget
from leaveout.trajectory import stack, twins
from leaveout.trajectory.trajectory import Trajectory
from problems import tiny_gpt

IDS = [0, 3, 7, 11, 12, 19]


@pytest.fixture
def two_threads(monkeypatch):
    """One model after the other on two threads, as models of some size are replayed."""
    monkeypatch.setattr(stack, "LARGE", 0)
    monkeypatch.setattr(query, "LARGE", 0)
    monkeypatch.setattr(twins, "_threads", lambda _device: 2)


def text():
    return *tiny_gpt(), lambda p: torch.optim.AdamW(p, lr=0.01)


def images():
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)).double()
    x = torch.randn(20, 1, 6, 6, generator=draw).double()
    return model, TensorDataset(x, torch.randint(3, (20,), generator=draw)), lambda p: torch.optim.SGD(p, lr=0.1)


def pooled():
    """With kinks, and large enough in float32 that sums in another order show."""
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 2), nn.Flatten(), nn.LazyLinear(3)
    )
    x = torch.randn(20, 2, 10, 10, generator=draw)
    model(x)
    return model, TensorDataset(x, torch.randint(3, (20,), generator=draw)), lambda p: torch.optim.SGD(p, lr=0.1)


def pooled_in_float64():
    model, data, make = pooled()
    return model.double(), TensorDataset(data.tensors[0].double(), data.tensors[1]), make


def without(run, problem, left_out):
    """The run trained by an ordinary loop in which the example's loss is left out of every batch's mean."""
    model, data, make = problem()
    optimizer = make(model.parameters())
    x, y = data.tensors
    for index in range(len(run)):
        ids = run.record(index).ids
        losses = nn.functional.cross_entropy(model(x[ids]), y[ids], reduction="none")
        losses = losses.reshape(len(ids), -1).mean(1)
        optimizer.zero_grad()
        (losses * (ids != left_out)).mean().backward()
        optimizer.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x), y)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("problem", [text, images, pooled_in_float64])
def test_replays_on_threads_are_plain_trainings_without_the_example(tmp_path, two_threads, problem):
    model, data, make = problem()
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    run = lo.train(task, make(model.parameters()), 3, 4, 0, tmp_path / "run")
    scores = lo.Replay(ids=IDS).score(run, task, data)
    base = without(run, problem, -1)
    for row, left_out in enumerate(IDS):
        expected = without(run, problem, left_out) - base
        assert abs(float(scores.values[row].mean()) - float(expected)) < 1e-9
    # No model is computed before the step that first uses its example.
    met = [torch.tensor([int(i in run.record(step).ids) for step in range(len(run))]).cumsum(0) > 0 for i in IDS]
    assert scores.cost.gradients == len(run) + sum(int(one.sum()) for one in met)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("problem", [text, pooled])
def test_threads_compute_the_same_bits_as_one(tmp_path, two_threads, monkeypatch, problem):
    """And so do models in shards of any size, whenever what they repeat was traced."""
    model, data, make = problem()
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    run = lo.train(task, make(model.parameters()), 2, 4, 0, tmp_path / "run")
    side_by_side = lo.Replay(ids=IDS).score(run, task, data)
    monkeypatch.setattr(twins, "_threads", lambda _device: 1)
    assert torch.equal(lo.Replay(ids=IDS).score(run, task, data).values, side_by_side.values)
    for shard in (1, 4):
        fresh = lo.Task(task.model, nn.CrossEntropyLoss(), data)
        resources = lo.Resources(work=tmp_path / f"work-{shard}", shard=shard)
        assert torch.equal(lo.Replay(ids=IDS).score(run, fresh, data, resources=resources).values, side_by_side.values)


def test_models_that_wait_for_their_step_need_no_room_for_activations(tmp_path, two_threads):
    model, data, make = text()
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    run = lo.train(task, make(model.parameters()), 1, 4, 0, tmp_path / "run")
    trajectory = Trajectory(run, task)
    each, waiting = budget.replay_bytes(trajectory), budget.model_bytes(trajectory)
    memory = torch.get_num_threads() * each + 2 * len(IDS) * waiting
    assert memory < 2 * len(IDS) * each
    scores = lo.Replay(ids=IDS).score(run, task, data, resources=lo.Resources(memory=memory))
    first = [next(step for step in range(len(run)) if i in run.record(step).ids) for i in IDS]
    assert scores.cost.gradients == len(run) + sum(len(run) - step for step in first)  # one model with every example
    assert torch.equal(scores.values, lo.Replay(ids=IDS).score(run, task, data).values)


def test_an_error_on_one_thread_is_raised_and_leaves_the_number_of_threads_as_it_was():
    def fails(item):
        raise ValueError(f"{item}")

    before = torch.get_num_threads()
    with pytest.raises(ValueError, match=r"[01]"):
        spread([fails, fails], [0, 1])
    assert torch.get_num_threads() == before
