"""Steps of optimizers other than the recorded one: said when they happen, never dropped without a word."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo
from refusal import refused

DATA = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(24) % 2)


class Hand:
    """An optimizer that is none of PyTorch's."""

    def __init__(self, params):
        self.params = list(params)

    @torch.no_grad()
    def step(self):
        for param in self.params:
            param -= 0.1 * param.grad

    def zero_grad(self):
        for param in self.params:
            param.grad = None


def built():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(recorder, model, optimizer, epochs=1):
    for _ in range(epochs):
        for x, y in recorder.watch(DataLoader(DATA, 4)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def test_a_second_optimizer_ends_the_recording_and_is_named(tmp_path):
    model, first = built()
    recorder = lo.Recorder(tmp_path / "run", model, first, keep="all")
    train(recorder, model, first)
    after = model.weight.detach().clone()
    with pytest.warns(lo.LeaveoutWarning, match="Another optimizer, Adam, has moved 'weight'.*up to step 5"):
        train(recorder, model, torch.optim.Adam(model.parameters(), lr=0.01))
    with pytest.warns(lo.LeaveoutWarning, match="As was said"):
        run = recorder.finish()
    assert len(run) == 6
    assert not run.manifest.finished
    assert torch.equal(run.final()["param"]["weight"], after)
    with refused(lo.RunError, "run-cut-short"):
        lo.open_run(tmp_path / "run")


def test_a_second_optimizer_can_stop_the_training(tmp_path):
    model, first = built()
    recorder = lo.Recorder(tmp_path / "run", model, first, on_problem="stop")
    train(recorder, model, first)
    with refused(lo.UnsupportedError, "other-optimizer", "Adam", "SGD"):
        train(recorder, model, torch.optim.Adam(model.parameters(), lr=0.01))


def test_an_optimizer_replaced_before_its_first_step_is_named(tmp_path):
    model, first = built()
    recorder = lo.Recorder(tmp_path / "run", model, first)
    with pytest.warns(lo.LeaveoutWarning, match="Adam.*SGD is recorded, and has not taken a step yet"):
        train(recorder, model, torch.optim.Adam(model.parameters(), lr=0.01))
    with refused(lo.RunError, "nothing-recorded", "Adam"):
        recorder.finish()


def test_steps_of_another_optimizer_before_the_first_are_no_part_of_it(tmp_path):
    model, second = built()
    recorder = lo.Recorder(tmp_path / "run", model, second, keep="all")
    with pytest.warns(lo.LeaveoutWarning, match="has not taken a step yet"):
        train(recorder, model, torch.optim.Adam(model.parameters(), lr=0.01))
    start = model.weight.detach().clone()
    train(recorder, model, second)
    run = recorder.finish()
    assert len(run) == 6
    assert run.record(0).ids.tolist() == [0, 1, 2, 3]
    assert torch.equal(run.state(0)["param"]["weight"], start)


def test_an_optimizer_that_is_none_of_pytorchs_is_noticed_by_what_it_moves(tmp_path):
    model, first = built()
    recorder = lo.Recorder(tmp_path / "run", model, first)
    train(recorder, model, first)
    with pytest.warns(lo.LeaveoutWarning, match="not by a step of the SGD"):
        train(recorder, model, Hand(model.parameters()))
    recorder.__exit__(KeyboardInterrupt)
    with refused(lo.InputError, "on-problem-unknown"):
        lo.Recorder(tmp_path / "other", *built(), on_problem="shout")


def test_the_other_network_of_a_pair_is_a_fact_and_no_problem(tmp_path):
    model, first = built()
    other = nn.Linear(2, 2)
    second = torch.optim.Adam(other.parameters())
    with lo.Recorder(tmp_path / "run", model, first) as recorder:
        for x, y in recorder.watch(DataLoader(DATA, 4)):
            first.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            first.step()
            other(torch.randn(2, 2)).sum().backward()
            second.step()
    assert lo.open_run(tmp_path / "run").manifest.seen["other-optimizer"] == "Adam"


def test_a_batch_drawn_by_hand_is_that_of_the_next_step(tmp_path):
    model, optimizer = built()
    recorder = lo.Recorder(tmp_path / "run", model, optimizer, keep="all")
    for _ in range(3):
        x, y = next(iter(recorder.watch(DataLoader(DATA, 4))))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for x, y in recorder.watch(DataLoader(DATA, 4)):  # noqa: B007 - left before its step
        break
    train(recorder, model, optimizer)
    run = recorder.finish()
    assert len(run) == 9
    assert [run.record(index).ids.tolist() for index in (0, 2, 3, 4)] == [[0, 1, 2, 3]] * 3 + [[4, 5, 6, 7]]
    check = lo.SGDIE().score(run, lo.Task(built()[0], nn.CrossEntropyLoss(), DATA), DATA)
    assert torch.isfinite(check.values).all()
