"""How far numbers can be trusted: rounding against float64, recurrences that grow, derivatives that break."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout._util.trees import norm
from leaveout.evaluate.precision import Doubled
from leaveout.run.model_match import constants_of
from problems import mostly_full, shared
from refusal import refused


def digits_like(n: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    draw = torch.Generator().manual_seed(n)
    x = torch.randn(n, 5, generator=draw, dtype=torch.float64)
    return TensorDataset(x.to(dtype), (x[:, 0] > 0).long())


def trained(path: Path, *, keep: str | int = "all") -> tuple[lo.Run, lo.Task]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    task = lo.Task(model, nn.CrossEntropyLoss(), digits_like(20))
    return lo.train(task, torch.optim.SGD(model.parameters(), 0.3, 0.5), 4, 5, seed=0, out=path, keep=keep), task


METHODS = (lo.SGDIE(), lo.ACC("free"), lo.ACC("exact"), lo.TracIn(), lo.Replay())


@pytest.mark.parametrize("keep", mostly_full(["all", 5], 5))
@pytest.mark.parametrize("method", mostly_full(METHODS, METHODS[0], METHODS[-1]), ids=lambda m: m.name)
def test_rounding_is_the_distance_to_a_run_in_float64(method: lo.Estimator, keep: str | int, tmp_path: Path) -> None:
    run, task = trained(tmp_path / "run", keep=keep)
    query = digits_like(6)
    scores = method.score(run, task, query)
    found = lo.rounding(scores, method, run, task, query, sample=8)
    assert found.count == 8
    assert 0 < found.typical <= found.largest < 1e-5 * found.scale
    assert found.worst in scores.train_ids
    assert "rounding does not matter" in str(found)
    # Scores that are wrong by a known amount are found to be.
    worst = scores.extreme(1)[0]
    values = scores.values.clone()
    values[worst] += 0.5 * found.scale
    wrong = lo.Scores(values, scores.train_ids, scores.query_ids, scores.method)
    told = lo.rounding(wrong, method, run, task, query, sample=20)
    assert told.largest == pytest.approx(0.5 * found.scale, rel=1e-4)
    assert told.worst == scores.train_ids[worst]
    assert "rounding is part of these scores" in str(told)


def test_float64_along_the_float32_run_is_the_same_sum_in_more_digits(tmp_path: Path) -> None:
    """The states are the recorded ones: against a float64 run from the same start the scores differ by more."""
    run, task = trained(tmp_path / "run")
    query = digits_like(6)
    double = task.of(task.objective.to_dtype(torch.float64))
    states = [run.state(i) for i in range(len(run) + 1)]

    seen = Doubled(run, constants_of(double.model, run.rule))
    assert all(
        torch.equal(seen.state(i)["param"]["0.weight"].float(), s["param"]["0.weight"]) for i, s in enumerate(states)
    )
    values = lo.SGDIE().score(seen, double, query).values
    assert values.dtype == torch.float64
    assert torch.allclose(values.float(), lo.SGDIE().score(run, task, query).values, rtol=1e-3, atol=1e-7)


def test_scores_by_another_method_or_of_groups_are_refused(tmp_path: Path) -> None:
    run, task = trained(tmp_path / "run")
    query = digits_like(6)
    scores = lo.SGDIE().score(run, task, query)
    with refused(lo.InputError, "scores-by-another-method", "SGD-IE", "TracIn"):
        lo.rounding(scores, lo.TracIn(), run, task, query)
    with refused(lo.InputError, "rounding-needs-examples"):
        lo.rounding(lo.SGDIE().score(run, task, query, groups=[[0, 1]]), lo.SGDIE(), run, task, query)
    with refused(lo.InputError, "sample-empty", "sample=0"):
        lo.rounding(scores, lo.SGDIE(), run, task, query, sample=0)
    with refused(lo.InputError, "seed-not-a-number", "seed=18446744073709551616"):
        lo.rounding(scores, lo.SGDIE(), run, task, query, sample=2, seed=2**64)


# Growth


def stretched(path: Path, unstable: range) -> tuple[lo.Run, lo.Task]:
    """Least squares in one dimension with H = 1: a step stretches by |1 − lr|, by 2 where it is unstable, else by 1/10.

    The examples pull in opposite directions, so that training stays at the optimum whatever the learning rate.
    """
    y = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]], dtype=torch.float64)
    data = TensorDataset(torch.ones_like(y), y)
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    task = lo.Task(model, lambda out, y: 0.5 * (out - y).square().flatten(1).mean(1), data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with lo.Recorder(path, model, optimizer) as recorder:
        for step in range(60):
            optimizer.param_groups[0]["lr"] = 3.0 if step in unstable else 0.9
            optimizer.zero_grad()
            batch = task.read(range(4))
            task.objective.losses(task.parameters(), batch).mean().backward()
            recorder.step([0, 1, 2, 3], batch)
            optimizer.step()
        return recorder.finish(), task


def query() -> TensorDataset:
    return TensorDataset(torch.ones(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64))


def fold(told: pytest.WarningsRecorder) -> float:
    return float(str(told[0].message).split("up to ")[1].split("-fold")[0])


@pytest.mark.parametrize("method", [lo.SGDIE(), lo.ACC("free")], ids=lambda m: m.name)
def test_a_recurrence_that_grows_for_long_is_said_with_its_steps(method: lo.Estimator, tmp_path: Path) -> None:
    run, task = stretched(tmp_path / "run", range(20, 40))
    where = r"From step 20 to step (39|40) .* grows up to .*-fold: .*smaller learning rate"
    with pytest.warns(lo.LeaveoutWarning, match=where) as told:
        method.score(run, task, query())
    assert fold(told) == pytest.approx(2**20, rel=0.1)


@pytest.mark.parametrize("method", [lo.SGDIE(direction="forward"), lo.ACC("exact")], ids=lambda m: m.name)
def test_displacements_that_grow_are_said_too(method: lo.Estimator, tmp_path: Path) -> None:
    """From the second step on: later, a displacement would already be where it stays for any learning rate."""
    run, task = stretched(tmp_path / "run", range(1, 60))
    with pytest.warns(lo.LeaveoutWarning, match=r"From step \d to step 59 .* grows") as told:
        method.score(run, task, query())
    assert fold(told) > 1e3


def test_a_short_or_mild_stretch_is_not_said(tmp_path: Path) -> None:
    run, task = stretched(tmp_path / "run", range(20, 28))
    whole, own = trained(tmp_path / "whole")
    with warnings.catch_warnings():
        warnings.simplefilter("error", lo.LeaveoutWarning)
        lo.SGDIE().score(run, task, query())
        for method in (lo.SGDIE(), lo.SGDIE(direction="forward"), lo.ACC("exact"), lo.ACC("free")):
            method.score(whole, own, digits_like(6))


def test_the_first_steps_of_adam_are_not_taken_for_growth(tmp_path: Path) -> None:
    """After lr·g/|g| a displacement is next to nothing, and after the second step of ordinary size."""
    problem = shared("mlp", "adam")
    assert problem.run.rule.slots[1:], "the optimizer has state"
    args = (problem.task, problem.query)
    first, second = (
        lo.SGDIE(direction="forward").score(problem.run.head(steps), *args, displacements=True).displacements
        for steps in (1, 2)
    )
    assert norm(second) > 1e3 * norm(first), "nothing grows here"
    for method in (lo.SGDIE(direction="forward"), lo.SGDIE(), lo.ACC("exact")):
        method.score(problem.run, *args)  # a warning would be an error


# Derivatives that break


class Beside(nn.Module):
    """A linear model, and BatchNorm beside it, so that no example's derivative can be taken alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 1, bias=False), nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).flatten() + 0 * self.norm(x).sum(1)


def rough_run(model: nn.Module, tmp_path: Path) -> tuple[lo.Run, lo.Task, TensorDataset]:
    """|w·x|^1.5 has no second derivative at zero, where the third example is; its gradient there is zero."""
    x = torch.ones(6, 2)
    x[3] = 0
    data = TensorDataset(x, torch.zeros(6))
    task = lo.Task(model, lambda out, y: (out - y).abs().pow(1.5), data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = [[0, 1], [2, 3], [4, 5]]
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        for ids in plan:
            optimizer.zero_grad()
            recorder.step(ids)
            model(x[ids]).abs().pow(1.5).mean().backward()
            optimizer.step()
        return recorder.finish(), task, data


@pytest.mark.parametrize("method", [lo.SGDIE(), lo.ACC("exact"), lo.ACC("free")], ids=lambda m: m.name)
def test_a_second_derivative_that_is_not_finite_names_step_and_example(method: lo.Estimator, tmp_path: Path) -> None:
    torch.manual_seed(0)
    run, task, data = rough_run(nn.Sequential(nn.Linear(2, 1, bias=False), nn.Flatten(0)), tmp_path)
    with refused(lo.MismatchError, "sweep-overflow", "At step 1", "example 3's loss"):
        method.score(run, task, data)


def test_a_second_derivative_that_is_not_finite_is_not_called_growth(tmp_path: Path) -> None:
    run, task, data = rough_run(Beside(), tmp_path)
    with refused(lo.MismatchError, "sweep-overflow", "At step 1", "(2, 3)", "no second derivative") as caught:
        lo.SGDIE().score(run, task, data)
    assert "learning rate" not in str(caught.value)
