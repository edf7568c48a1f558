"""Runs that have together what real runs have go through everything: replays, checks, crashes, plans, the page."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import every_kind
import leaveout as lo
from every_kind import KINDS
from problems import mostly_full

LEFT_OUT = [0, 7]


@lru_cache
def recorded(name: str) -> tuple[lo.Run, lo.Task, every_kind.Training]:
    """A kind's run, or what of it is scored, its task with the trained model, and the training."""
    kind = KINDS[name]
    training = kind(Path(tempfile.mkdtemp()) / "run").train()
    run = training.recorder.finish()
    task = kind.task()
    task.model.load_state_dict(training.model.state_dict())
    return (run if kind.at is None else run.average()), task, training


@pytest.mark.parametrize("name", KINDS)
def test_recording_changes_no_bit(name: str) -> None:
    _, _, training = recorded(name)
    plain = KINDS[name]().train()
    for one, other in zip(training.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", KINDS)
def test_replay_is_training_without_the_example(name: str) -> None:
    run, task, _ = recorded(name)
    kind = KINDS[name]
    if name == "together":
        task = kind.task(statistics="stay")  # the plain training gives the example no weight, and leaves it in
    scores = lo.Replay().score(run, task, kind.query(), ids=LEFT_OUT).values.flatten().tolist()
    base = kind().train().query_loss()
    truth = [kind(out=k).train().query_loss() - base for k in LEFT_OUT]
    near = {"rel": 1e-9} if kind.dtype == torch.float64 else {"rel": 0.02, "abs": 2e-6}
    assert scores == pytest.approx(truth, **near)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    subprocess.run([sys.executable, every_kind.__file__, str(folder)], check=True, timeout=300)
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_a_killed_recording_goes_on_as_if_nothing_had_been(name: str, killed: Path) -> None:
    run, _, _ = recorded(name)
    training = KINDS[name](killed / name, resume=True)
    assert 1 <= training.recorder.done < len(run)
    training.train()
    again = training.recorder.finish()
    assert lo.check_run(killed / name) == []
    assert len(again) == len(run)
    for one, other in zip(run.final().values(), again.final().values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert [run.record(i).hypers for i in range(len(run))] == [again.record(i).hypers for i in range(len(run))]


@pytest.mark.parametrize("name", mostly_full(KINDS, "together", "float16"))
def test_everything_works_on_every_kind(name: str, tmp_path) -> None:
    run, task, _ = recorded(name)
    study = lo.Study(run, task, KINDS[name].query(), resources=lo.Resources(progress=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lo.LeaveoutWarning)
        scores = study.score(lo.ACC())
        check = study.verify(scores, replays=10)
        refined = study.refine(scores, top=3)
        curve = study.cleanse(test_set=KINDS[name].query(), remove=[2], random=1)
        page = study.report(tmp_path / "page.html")
        plan = lo.plan(task, KINDS[name].query(), run=run)
    truth = lo.Replay().score(run, task, KINDS[name].query()).values.flatten()
    known = refined.exact.flatten().nonzero().flatten()
    assert len(known) >= 3
    assert torch.allclose(refined.values.flatten()[known], truth[known], rtol=1e-4, atol=1e-6)
    assert len(check.table) == 10
    assert len(curve.table) >= 2
    assert page.stat().st_size > 10_000
    assert {"SGD-IE", "Replay"} <= set(plan.index)
    assert bool((plan["seconds"] > 0).all())
    assert lo.check_run(run.path) == []
