"""How a run is stored never changes a score."""

import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout._util.trees import each, norm
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.trajectory import trajectory as trajectory_module
from leaveout.trajectory.left_out import leave_out
from leaveout.trajectory.replay import counterfactuals
from leaveout.trajectory.trajectory import Trajectory
from problems import CHECK, MODELS, OPTIMIZERS, data_for, mostly_full, shared_task
from refusal import refused

METHODS = (lo.SGDIE(), lo.ACC("exact"), lo.TracIn(), lo.Replay())


def kept(path, keep, *, optimizer="nesterov", disk="2GB", epochs=6):
    make, loss, l2 = MODELS["mlp"]
    torch.manual_seed(0)
    model = make()
    train = data_for("mlp", 11, 0)
    task = lo.Task(model, loss, train, l2=l2, check=CHECK)
    made = OPTIMIZERS[optimizer](model)
    order = torch.Generator().manual_seed(0)
    with lo.Recorder(path, model, made, keep=keep, disk=disk) as recorder:
        for epoch in range(epochs):
            for ids in torch.randperm(11, generator=order).split(4):
                made.zero_grad()
                task.objective.losses(task.parameters(), task.read(ids.tolist())).mean().backward()
                recorder.step(ids, task.read(ids.tolist()), epoch=epoch)
                made.step()
        return recorder.finish(), shared_task("mlp", 11)


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
@pytest.mark.parametrize("keep", mostly_full([1, 4, 7, 1000, "auto"], 4))
def test_states_between_kept_ones_are_computed_again(tmp_path, keep, optimizer):
    whole, task = kept(tmp_path / "all", "all", optimizer=optimizer)
    run, _ = kept(tmp_path / "some", keep, optimizer=optimizer, disk=100)
    assert whole.kept == list(range(len(whole) + 1))
    assert run.kept[0] == 0
    assert run.kept[-1] == len(run) == len(whole) == 18
    assert keep == 1 or len(run.kept) < len(whole.kept)
    for i, (a, b) in enumerate(zip(Trajectory(whole, task).forward(), Trajectory(run, task).forward(), strict=True)):
        assert a.record.index == b.record.index == i
        for slot in whole.rule.slots:
            for name in whole.rule.groups:
                assert torch.allclose(a.before[slot][name], b.before[slot][name], rtol=1e-12, atol=1e-14)
                assert torch.allclose(a.after[slot][name], b.after[slot][name], rtol=1e-12, atol=1e-14)
    backward = [step.record.index for step in Trajectory(run, task).backward()]
    assert backward == list(reversed(range(len(run))))
    middle = Trajectory(run, task).recorded_step(5)
    assert torch.allclose(middle.before["param"]["0.weight"], whole.state(5)["param"]["0.weight"], rtol=1e-12)
    query = data_for("mlp", 3, 1)
    for method in METHODS:
        expected, values = (method.score(r, task, query).values for r in (whole, run))
        assert (values - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_a_disk_budget_is_kept(tmp_path):
    """States of a long run thin out before the budget is used up, and the files stay within it."""
    torch.manual_seed(0)
    model, data = torch.nn.Linear(200, 100), torch.randn(16, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # 160 kB per state, or 80 as a gradient
    with lo.Recorder(tmp_path / "run", model, optimizer, disk="2MB") as recorder:
        for _ in range(300):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            recorder.step(range(16))
            optimizer.step()
        run = recorder.finish()
    assert run.kept[0] == 0
    assert run.kept[-1] == 300
    assert 8 <= len(run.kept) <= 25
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 1.2 * 2e6
    roomy, _ = kept(tmp_path / "roomy", "auto", epochs=20)
    assert len(roomy.kept) == len(roomy) + 1


def test_large_states_are_not_all_held_going_backward(tmp_path, monkeypatch):
    run, task = kept(tmp_path / "run", 1000)
    expected = [step.before["param"] for step in Trajectory(run, task).backward()]
    monkeypatch.setattr(trajectory_module, "CACHE", 0)
    monkeypatch.setattr(trajectory_module, "FEWEST", 3)
    again, made, most = [], [], 0
    held = Trajectory(run, task)
    between = held._between

    def counted(*arguments):
        nonlocal most
        for state in between(*arguments):
            made.append(weakref.ref(state["param"]["0.weight"]))
            yield state
            most = max(most, sum(one() is not None for one in made))

    monkeypatch.setattr(held, "_between", counted)
    for step in held.backward():
        again.append(each(torch.clone, step.before["param"]))
        del step
    assert most < 12 < len(run)
    for one, other in zip(again, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_state_that_the_recorded_batches_do_not_lead_to_is_named(tmp_path):
    run, task = kept(tmp_path / "run", 6, optimizer="sgd")
    other = lo.Task(task.model, nn.BCEWithLogitsLoss(), task.train_set, l2=0.3)
    with refused(lo.MismatchError, "step-does-not-follow", "Step 17"):
        lo.SGDIE().score(run, other, task.train_set)
    with refused(lo.MismatchError, "step-does-not-follow", "Step 5"):
        lo.ACC("exact").score(run, other, task.train_set)


def test_interpolated_states_lie_on_a_line_and_come_close(tmp_path):
    whole, task = kept(tmp_path / "all", "all")
    run, _ = kept(tmp_path / "some", 3)
    states = [step.before["param"]["0.weight"] for step in Trajectory(run.interpolated(), task).forward()]
    expected = whole.state(3)["param"]["0.weight"] * 2 / 3 + whole.state(6)["param"]["0.weight"] / 3
    assert torch.allclose(states[4], expected, rtol=1e-12)
    query = data_for("mlp", 3, 1)
    exact = lo.SGDIE().score(whole, task, query).values
    rough = lo.SGDIE().score(run.interpolated(), task, query).values
    assert 1e-9 < (rough - exact).norm() / exact.norm() < 0.1


@pytest.mark.parametrize("keep", [0, -1, "some"])
def test_unknown_ways_to_keep_are_refused(tmp_path, keep):
    model = nn.Linear(2, 1)
    with refused(lo.InputError, "keep-unknown", "keep="):
        lo.Recorder(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), keep=keep)
    assert not (tmp_path / "run").exists()


def test_a_run_cut_short_ends_at_its_last_kept_state(tmp_path):
    model = nn.Linear(2, 1).double()
    data = TensorDataset(torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = lo.Task(model, nn.MSELoss(), data)

    def interrupted():
        with lo.Recorder(tmp_path / "run", model, optimizer, keep=4) as recorder:
            for step in range(11):
                optimizer.zero_grad()
                task.objective.losses(task.parameters(), task.read([step % 6, 0])).mean().backward()
                recorder.step([step % 6, 0])
                optimizer.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with refused(lo.RunError, "run-cut-short", "step 7", "partial=True"):
        lo.open_run(tmp_path / "run")
    run = lo.open_run(tmp_path / "run", partial=True)
    assert len(run) == 8
    model.load_state_dict(run.state(0)["param"])
    whole = torch.optim.SGD(model.parameters(), lr=0.1)
    with lo.Recorder(tmp_path / "whole", model, whole) as recorder:
        for step in range(8):
            whole.zero_grad()
            task.objective.losses(task.parameters(), task.read([step % 6, 0])).mean().backward()
            recorder.step([step % 6, 0])
            whole.step()
    values, expected = (lo.Replay().score(r, task, data).values for r in (run, recorder.finish()))
    assert expected.abs().min() > 1e-6
    assert torch.allclose(values, expected, rtol=1e-12)


def unsteady(path, dtype):
    """A training that magnifies small differences: a learning rate far too large."""
    order = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 6, generator=order).to(dtype), torch.randint(0, 2, (64,), generator=order))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    return lo.train(task, torch.optim.SGD(model.parameters(), lr=2.0), 30, 16, 0, path, keep="all"), task


def test_a_replay_that_rounding_led_away_is_told_of_and_not_refused(tmp_path):
    run, task = unsteady(tmp_path / "single", torch.float32)
    with pytest.warns(lo.LeaveoutWarning, match="At step \\d+ the replay .* by rounding alone"):
        scores = lo.Replay((0, 1)).score(run, task, task.train_set)
    assert torch.isfinite(scores.values).all()
    exact, double = unsteady(tmp_path / "double", torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lo.Replay((0, 1)).score(exact, double, double.train_set)
    other = lo.Task(task.model, nn.CrossEntropyLoss(), task.train_set, l2=0.01)
    with refused(lo.MismatchError, "step-does-not-follow", "Step 0"):
        lo.Replay((0, 1)).score(run, other, task.train_set)


def test_a_replay_that_left_its_way_still_notices_a_step_that_does_not_follow(tmp_path):
    run, task = unsteady(tmp_path / "run", torch.float32)
    moved = Trajectory(run, task)
    read = moved._batch

    def batch(record, params):
        ready = read(record, params)
        x, y = ready.batch
        return ready._replace(batch=[x * 1.1, y]) if record.index == 110 else ready

    moved._batch = batch
    with pytest.warns(lo.LeaveoutWarning), refused(lo.MismatchError, "step-does-not-follow", "Step 110"):
        counterfactuals(moved, leave_out(task.size, (0,)), 0.0, Resources(progress=False), Cost())


def test_a_unit_that_rounding_switched_on_is_no_mismatch(tmp_path):
    """For the first example the first unit's input is zero: whether it counts is up to rounding."""
    x = torch.tensor([[1.0, 1.0], [0.5, -1.0], [-1.0, 0.3], [0.2, 0.7]])
    data = TensorDataset(x, torch.tensor([0, 1, 0, 1]))

    def made(weight):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 2))
        with torch.no_grad():
            model[0].weight[0] = torch.tensor(weight)
        task = lo.Task(model, nn.CrossEntropyLoss(), data)
        lo.train(task, torch.optim.SGD(model.parameters(), lr=0.1), 1, 4, 0, tmp_path / str(weight), keep="all")
        return Trajectory(lo.open_run(tmp_path / str(weight)), task)

    off, on, smooth = made((1.0, -1.0)), made((1.0, -1.0 + 2e-7)), made((0.9, -1.0))
    step, other, plain = off.recorded_step(0), on.recorded_step(0), smooth.recorded_step(0)
    jump = each(torch.sub, other.after["param"], step.after["param"])
    assert norm(jump) > 0.01 * norm(each(torch.sub, step.after["param"], step.before["param"]))
    off.check.step(step, other.after)
    with refused(lo.MismatchError, "step-does-not-follow", "Step 0"):  # as far away, where nothing jumps
        smooth.check.step(plain, {"param": each(torch.add, plain.after["param"], jump)})
