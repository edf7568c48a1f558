"""A time budget is a limit: what does not fit is left out, and that is said."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.compute.clock import Clock, OutOfTimeError
from leaveout.evaluate.check import agreement_of
from leaveout.evaluate.replays import Replays
from leaveout.evaluate.verdict import Verdict

SLACK = 1.2


def problem(path: Path, model: nn.Module, shape: tuple[int, ...], rows: int, epochs: int) -> tuple[Any, ...]:
    order = torch.Generator().manual_seed(0)
    inputs, queries = (torch.randn(count, *shape, generator=order) for count in (rows, 40))
    parts = [TensorDataset(x, (x.flatten(1).sum(1) > 0).long()) for x in (inputs, queries)]
    task = lo.Task(model, nn.CrossEntropyLoss(), parts[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return lo.train(task, optimizer, epochs, 50, 0, path / "run"), task, parts[1]


@pytest.fixture
def mlp(tmp_path: Path) -> tuple[Any, ...]:
    """A run whose replays take about 20 s of processor time in all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 2))
    return problem(tmp_path, model, (64,), 1000, 10)


def spent(work: Any) -> tuple[Any, float]:
    began = time.process_time()
    return work(), time.process_time() - began


@pytest.mark.parametrize("budget", [4.0])
def test_scores_and_checks_end_in_time(mlp: tuple[Any, ...], budget: float) -> None:
    chosen, seconds = spent(lambda: lo.choose(*mlp, budget=budget))
    assert seconds <= SLACK * budget
    assert not chosen.exact
    scores = lo.SGDIE().score(*mlp)
    check, seconds = spent(lambda: lo.verify(scores, *mlp, replays=900, budget=budget))
    assert seconds <= SLACK * budget
    assert len(check.table) < 900
    assert f"{len(check.table)} of 900 replays" in check.sentence
    assert f"fitted into {budget:g} s of processor time; budget=" in check.sentence
    assert (check.table["sample"] == "extreme").sum() == pytest.approx(len(check.table) / 2, abs=1)
    again = lo.Check.load(check.save(mlp[0].path / "check.json"))
    assert (again.omitted, again.budget) == (check.omitted, budget)


def test_what_fits_is_done_in_full(mlp: tuple[Any, ...]) -> None:
    run, task, query = mlp
    scores = lo.SGDIE().score(*mlp)
    check = lo.verify(scores, *mlp, replays=16)
    assert len(check.table) == 16
    assert not check.omitted
    truth = lo.Replay().score(*mlp, ids=check.table.index.tolist())
    assert check.table["truth"].tolist() == pytest.approx(truth.values[:, 0].tolist(), rel=1e-3, abs=1e-6)
    assert lo.choose(run.head(20), task, query, ids=range(40)).exact


def test_few_replays_are_too_few_to_tell(mlp: tuple[Any, ...], tmp_path: Path) -> None:
    run, task, query = mlp
    scores = lo.SGDIE().score(*mlp)
    whole = lo.verify(scores, *mlp, replays=8, moves=0)
    few = whole.table.iloc[:3]
    extreme, random = (few[few["sample"] == kind] for kind in ("extreme", "random"))
    check = lo.Check(agreement_of(extreme), agreement_of(random), whole.spread, few, scores.method, whole.cost)
    assert check.verdict is Verdict.FEW
    assert "too few to tell" in check.sentence
    assert "nan" not in check.sentence
    page = lo.report(tmp_path / "x.html", run, scores, check, task=task, query=query)
    assert "too few to tell" in Path(page).read_text().lower()


def test_a_budget_for_nothing_is_refused_with_the_one_that_would_do(mlp: tuple[Any, ...]) -> None:
    with pytest.raises(lo.InputError, match="budget=") as error:
        lo.verify(lo.SGDIE().score(*mlp), *mlp, budget=1e-3)
    assert error.value.code == "budget-too-small"


def _burn(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


def test_work_that_would_take_too_long_is_stopped_early() -> None:
    clock, done = Clock(0.5), []

    def work() -> None:
        for item in clock.watch(range(1000), 1000):
            _burn(0.01)
            done.append(item)

    with pytest.raises(OutOfTimeError) as error:
        work()
    assert len(done) <= 5
    assert error.value.seconds == pytest.approx(10, rel=0.5)
    assert list(Clock(60).watch(range(1000), 1000)) == list(range(1000))


def test_parts_that_do_not_fit_are_made_smaller() -> None:
    """Replays of one row in 10 ms: 0.2 s hold no more than 20, whatever the first part was."""
    taken = []

    def truth(rows: Any, clock: Clock) -> lo.Scores:
        for row in clock.watch(rows, len(rows)):
            _burn(0.01)
            taken.append(row)
        return lo.Scores(torch.tensor([[float(row)] for row in rows]), tuple(rows), ("mean",), "Replay")

    replays, clock = Replays(truth), Clock(0.2)
    assert not replays.take(range(100), clock)
    assert 8 <= len(replays.rows) <= 20
    assert replays.rows == list(range(len(replays.rows)))
    assert replays.values[:, 0].tolist() == replays.rows
    assert clock.spent <= SLACK * 0.2 + 0.02
    more = Replays(truth)
    assert more.take(range(5), Clock(60))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:At step .* the replay with every example has left")
def test_a_minute_is_a_minute_with_batch_norm(tmp_path: Path) -> None:
    """A CNN with BatchNorm, where no replays go side by side and a gradient without each example in turn is slow."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 2))
    asked = problem(tmp_path, model, (3, 32, 32), 1000, 10)
    study = lo.Study(*asked)
    scores, seconds = spent(study.score)
    assert seconds <= SLACK * 60
    assert not scores.all_exact
    assert "replays fitted into 60 s of processor time; budget=" in str(study.choice)
    check, seconds = spent(lambda: study.verify(replays=64))
    assert seconds <= SLACK * 60
    assert len(check.table) >= 8
    assert check.omitted in check.sentence
    _, seconds = spent(lambda: lo.choose(*asked, budget=8))
    assert seconds <= SLACK * 8
