"""Predictions hold, within a factor, when the thing is then done."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from refusal import refused

ESTIMATORS = {
    "TracIn": lo.TracIn(),
    "SGD-IE": lo.SGDIE(),
    "DVEmb(ggn)": lo.DVEmb(),
    "ACC(free)": lo.ACC(),
    "ACC(subspace 8)": lo.ACC(lo.Subspace(8)),
    "ACC(exact)": lo.ACC("exact"),
    "Replay": lo.Replay(),
}


def problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(320, 32, generator=generator)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    return lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(x, (x[:, 0] > 0).long())), TensorDataset(
        x[:9], x[:9, 0].long() * 0
    )


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def measured(estimator, run, query) -> lo.Cost:
    """What scoring takes, without the seconds in which the processor worked for others."""
    wall, own = time.perf_counter(), time.process_time()
    cost = estimator.score(run, problem()[0], query).cost
    share = (time.process_time() - own) / (time.perf_counter() - wall)
    return replace(cost, seconds=cost.seconds * min(1.0, share))


@pytest.mark.full
@pytest.mark.parametrize("planned", [False, True])
def test_predictions_come_within_a_factor(tmp_path, planned):
    """Within 4, and one of four attempts may meet a better moment: other tests share the processor's caches."""
    task, query = problem()
    run = lo.train(task, optimizer(task.model), 40, 32, 0, tmp_path / "run")
    described = {"optimizer": optimizer, "epochs": 40, "batch_size": 32} if planned else {"run": run}
    for _ in range(4):
        plan = lo.plan(problem()[0], query, **described)
        assert list(plan.index)[int(planned) :] == list(ESTIMATORS)
        costs = {name: measured(estimator, run, query) for name, estimator in ESTIMATORS.items()}
        off = {name: plan.loc[name, "seconds"] / cost.seconds for name, cost in costs.items()}
        if all(1 / 4 < ratio < 4 for ratio in off.values()):
            break
    else:
        raise AssertionError(f"predicted over measured seconds: {off}")
    for name, cost in costs.items():
        assert cost.peak_memory / 1.5 < plan.loc[name, "memory"] < cost.peak_memory * 1.5, name
    if planned:
        written = sum(file.stat().st_size for file in run.path.iterdir())
        assert written / 1.5 < plan.loc["training, recorded", "disk"] < written * 1.5


@pytest.mark.full
def test_planning_takes_seconds_however_long_the_run_and_shows_a_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # a terminal, as far as rich can tell
    task, query = problem()
    run = lo.train(task, optimizer(task.model), 1000, 32, 0, tmp_path / "run")
    start = time.process_time()
    plan = lo.plan(task, query, run)
    taken = time.process_time() - start
    assert taken < 10
    assert taken < plan["seconds"].sum() / 20
    assert "measuring" in capsys.readouterr().err


def test_nothing_to_plan_is_refused():
    task, query = problem()
    with refused(lo.InputError, "nothing-to-plan"):
        lo.plan(task, query)
