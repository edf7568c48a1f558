"""A loop that saves and loads checkpoints of its own takes the run along, also where it is killed in between."""

import os
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import nn

import leaveout as lo

EVERY, STEPS = 5, 18


def data():
    order = torch.Generator().manual_seed(0)
    return torch.randn(12, 4, generator=order), torch.randint(3, (12,), generator=order)


def loop(folder: Path, *, start: int = 0, stop: int = STEPS, kill: bool = False, keep="all", nudge: float = 0.0):
    """Train with dropout from a checkpoint after ``start`` steps; checkpoints are saved every few steps."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    plan = [torch.randperm(12, generator=torch.Generator().manual_seed(step))[:4] for step in range(STEPS)]
    x, y = data()
    if start:
        saved = torch.load(folder / f"{start}.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
    with torch.no_grad():
        model[4].bias += nudge
    recorder = lo.Recorder(folder / "run", model, optimizer, keep=keep, resume=start)
    for step in range(start, stop):
        optimizer.zero_grad()
        recorder.step(plan[step], [x[plan[step]], y[plan[step]]])
        nn.functional.cross_entropy(model(x[plan[step]]), y[plan[step]]).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            recorder.flush()
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
            torch.save(saved, folder / f"{step + 1}.pt")
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    return recorder.finish(), model


def killed(folder: Path, **how) -> None:
    process = get_context("fork").Process(target=loop, args=(folder,), kwargs={**how, "kill": True})
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def same(one: lo.Run, two: lo.Run) -> None:
    assert len(one) == len(two) == STEPS
    for index in sorted({*one.kept} & {*two.kept}):
        a, b = one.state(index), two.state(index)
        assert all(torch.equal(a[slot][name], b[slot][name]) for slot in a for name in a[slot])
    for index in range(STEPS):
        a, b = one.record(index), two.record(index)
        assert torch.equal(a.ids, b.ids)
        assert (a.hypers, a.fingerprint) == (b.hypers, b.fingerprint)
        assert all(torch.equal(p.random["cpu"], q.random["cpu"]) for p, q in zip(a.parts, b.parts, strict=True))


def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    return tmp_path / "whole", tmp_path / "cut"


@pytest.mark.parametrize("keep", ["all", 4])
def test_a_killed_loop_goes_on_from_its_checkpoint(keep, tmp_path: Path) -> None:
    whole, cut = folders(tmp_path)
    run, model = loop(whole, keep=keep)
    killed(cut, stop=13, keep=keep)
    again, _ = loop(cut, start=10, keep=keep)
    same(again, run)
    assert {5, 10, 15} <= set(again.kept)
    assert lo.check_run(cut / "run") == []
    x, y = data()
    train_set = torch.utils.data.TensorDataset(x, y)
    lo.SGDIE().score(again, lo.Task(model, nn.CrossEntropyLoss(), train_set), train_set)  # which checks every step


def test_later_steps_are_dropped_also_those_of_a_finished_run(tmp_path: Path) -> None:
    whole, cut = folders(tmp_path)
    run, _ = loop(whole)
    loop(cut)
    killed(cut, start=5, stop=7)  # what it took away was not on disk yet
    assert len(lo.open_run(cut / "run")) == STEPS
    killed(cut, start=5, stop=11)  # now it is, with the checkpoint after step 10
    assert len(lo.open_run(cut / "run", partial=True)) == 10
    same(loop(cut, start=5)[0], run)
    assert lo.check_run(cut / "run") == []


def test_no_further_step_leaves_the_run_as_it_is_up_to_the_checkpoint(tmp_path: Path) -> None:
    loop(tmp_path)
    run, _ = loop(tmp_path, start=10, stop=10)
    assert len(run) == 10
    assert lo.check_run(run.path) == []


def test_another_checkpoint_is_refused(tmp_path: Path) -> None:
    loop(tmp_path, keep=7)
    with pytest.raises(lo.LeaveoutError) as error:
        loop(tmp_path, start=10, nudge=0.1)
    assert error.value.code == "checkpoint-differs"
    assert "4.bias" in str(error.value)
    (tmp_path / "12.pt").write_bytes((tmp_path / "10.pt").read_bytes())
    with pytest.raises(lo.LeaveoutError) as error:
        loop(tmp_path, start=12)
    assert error.value.code == "checkpoint-not-recorded"
    assert len(lo.open_run(tmp_path / "run")) == STEPS
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/10.pt").write_bytes((tmp_path / "10.pt").read_bytes())
    with pytest.raises(lo.LeaveoutError) as error:
        loop(tmp_path / "empty", start=10)
    assert error.value.code == "run-not-found"
