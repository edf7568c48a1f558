"""Runs of every optimizer: derivatives against torch's own steps, scores against retraining, going on after a cut.

A new optimizer is tested by being in the registry; so are all the settings of ``optimizer_cases`` that it takes.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import leaveout as lo
from leaveout._util.trees import PARAM, State
from leaveout.optim import HyperReader, Rule, optimizers, rule_of
from leaveout.run.recording import writer as writing
from optimizer_cases import CASES, Steps, make_of, unrounded
from problems import data_for, flat, mostly_full

BATCHES = [[0, 1, 2, 3], [4, 5], [1, 4, 0, 1], [2, 3, 5], [0, 5, 3, 2], [4, 1]]
LOSS = nn.BCEWithLogitsLoss()
RUNS = [case for case in CASES if case.split(", ")[1] not in ("decay", "betas", "momentum", "dampening", "accumulated")]
RUNS = [case for case in RUNS if "maximize" not in case or case.startswith("SGD")]
"""Whole runs, one at least of each optimizer; what is left out changes numbers of a step and nothing else."""
PLAIN = [case for case in RUNS if case.endswith(", plain")]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)).double()


def recorded(path: Path, make, *, stop: int | None = None, keep: str | int = 2, resume: bool = False) -> lo.Run | None:
    """The plain loop of ``Steps``, recorded; stopped before a step."""
    model = mlp()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    data = data_for("mlp", 6, 0).tensors
    recorder = lo.Recorder(path, model, optimizer, keep=keep, resume=resume)
    for i, ids in enumerate(BATCHES):
        if i >= recorder.done:
            if i == stop:
                with recorder:
                    recorder.__exit__(KeyboardInterrupt, None, None)
                return None
            optimizer.zero_grad()
            x, y = data[0][ids], data[1][ids]
            LOSS(model(x), y).backward()
            recorder.step(ids, [x, y], epoch=i // 2)
            optimizer.step()
        schedule.step()
    return recorder.finish()


def steps_of(make) -> Steps:
    return Steps(mlp(), make, LOSS, data_for("mlp", 6, 0).tensors, BATCHES)


@cache
def task_with(frozen: tuple[str, ...]) -> lo.Task:
    model = mlp()
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    return lo.Task(model, LOSS, data_for("mlp", 6, 0))


def task_of(make) -> lo.Task:
    """One task serves all optimizers that train the same parameters."""
    model = mlp()
    make(model)  # some freeze what they cannot train
    return task_with(tuple(name for name, param in model.named_parameters() if not param.requires_grad))


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = expected.abs().max()
    assert scale > 1e-7, "a comparison with zero shows nothing"
    assert (actual - expected).abs().max() <= tolerance * scale


def state_from(vector: Tensor, steps: Steps, rule: Rule, params: dict[str, Tensor]) -> State:
    """The flat vector of ``Steps`` as a stack of one state."""
    names = list(params)
    keys = [(name, PARAM) for name in names] + [(names[i], slot) for i, slot in steps.keys]
    shape = rule.definition.shape
    state: State = {}
    for slot in rule.slots:
        state[slot] = {n: torch.zeros(1, *shape(slot, p.shape)).double() for n, p in params.items()}
    for (name, slot), part in zip(keys, vector.split([state[s][n].numel() for n, s in keys]), strict=True):
        state[slot][name] = part.reshape(state[slot][name].shape).clone()
    return state


def flat_from(state: State, steps: Steps, names: list[str]) -> Tensor:
    parts = [state[PARAM][name] for name in names] + [state[slot][names[i]] for i, slot in steps.keys]
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("case", CASES)
def test_derivatives_of_a_step_are_those_of_torchs_own(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unrounded(monkeypatch)
    make = make_of(case)
    steps = steps_of(make)
    torch.manual_seed(1)
    at = steps.state(4)
    gradient = torch.randn(len(steps.final)).double()
    jacobian = steps.jacobian(4, gradient)
    model, optimizer = steps.at(4)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    rule, names = rule_of(optimizer, model), list(params)
    hypers = HyperReader(optimizer, rule, params).next().hypers
    size = len(at)

    def split(vector: Tensor) -> tuple[State, dict[str, Tensor]]:
        parts = vector[size:].split([param.numel() for param in params.values()])
        along = {n: part.reshape(1, *params[n].shape) for n, part in zip(names, parts, strict=True)}
        return state_from(vector[:size], steps, rule, params), along

    point = split(torch.cat([at, gradient]))
    along, back = torch.randn(size + len(gradient)).double(), torch.randn(size).double()
    close(flat_from(rule.tangent(point, split(along), hypers), steps, names), jacobian @ along, 1e-6)
    state, inner = rule.cotangent(point, state_from(back, steps, rule, params), hypers)
    pulled = torch.cat([flat_from(state, steps, names), *(inner[name].flatten() for name in names)])
    close(pulled, back @ jacobian, 1e-6)


@pytest.mark.parametrize("case", mostly_full(RUNS, *PLAIN, "SGD, nesterov"))
def test_scores_follow_torchs_own_training(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGD-IE is the derivative of retraining, ACC its recurrence, Replay retraining itself."""
    unrounded(monkeypatch)
    make = make_of(case)
    steps, task = steps_of(make), task_of(make)
    run = recorded(tmp_path / "run", make)
    args = (run, task, data_for("mlp", 4, 1))
    names, h = list(run.rule.groups), 1e-4
    for estimator, expected in (
        (lo.SGDIE(), lambda k: -(steps.retrained(k, 1 + h) - steps.retrained(k, 1 - h)) / (2 * h)),
        (lo.ACC("exact"), lambda k: steps.displacement(k, "acc")),
        (lo.Replay(), lambda k: steps.retrained(k, 0.0) - steps.final),
    ):
        scores = estimator.score(*args, displacements=True)
        truth = torch.stack([expected(k) for k in range(6)])
        close(flat(scores, names), truth, 1e-9 if isinstance(estimator, lo.Replay) else 1e-5)
        if isinstance(estimator, lo.SGDIE):
            close(lo.SGDIE(direction="backward").score(*args).values, scores.values, 1e-9)


@pytest.mark.parametrize("case", mostly_full(PLAIN, "Adam, plain", "Adafactor, plain"))
def test_exact_acc_of_one_example_passes_batches_without_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unrounded(monkeypatch)
    make = make_of(case)
    run, asked = recorded(tmp_path / "run", make), data_for("mlp", 4, 1)
    scores = lo.ACC("exact").score(run, task_of(make), asked, ids=[3], displacements=True)
    close(flat(scores, list(run.rule.groups)), steps_of(make).displacement(3, "acc")[None], 1e-5)


class Scaled(nn.Module):
    """Its first parameter is a single number, without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.tensor(1.5, dtype=torch.float64)), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x)


@pytest.mark.parametrize("case", mostly_full(PLAIN, "Adam, plain", "Adafactor, plain"))
def test_a_parameter_without_a_dimension(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unrounded(monkeypatch)
    make, data, model = make_of(case), data_for("mlp", 6, 0), Scaled()
    steps = Steps(Scaled(), make, LOSS, data.tensors, BATCHES)
    optimizer = make(model)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for ids in BATCHES:
        optimizer.zero_grad()
        recorder.step(ids)
        LOSS(model(data.tensors[0][ids]), data.tensors[1][ids]).backward()
        optimizer.step()
        schedule.step()
    run, task = recorder.finish(), lo.Task(model, LOSS, data, check=False)
    for estimator, expected, tolerance in (
        (lo.Replay(), lambda k: steps.retrained(k, 0.0) - steps.final, 1e-9),
        (lo.ACC("exact"), lambda k: steps.displacement(k, "acc"), 1e-5),
    ):
        scores = estimator.score(run, task, data_for("mlp", 4, 1), ids=[0, 3], displacements=True)
        close(flat(scores, list(run.rule.groups)), torch.stack([expected(k) for k in (0, 3)]), tolerance)


@pytest.mark.parametrize("case", RUNS)
def test_a_run_that_is_cut_short_goes_on_as_if_it_were_not(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SHARD_STEPS", 2)
    make = make_of(case)
    whole = recorded(tmp_path / "whole", make)
    recorded(tmp_path / "run", make, stop=4)
    run = recorded(tmp_path / "run", make, resume=True)
    assert run.kept == whole.kept
    for index in run.kept:
        for slot, params in whole.state(index).items():
            assert all(torch.equal(run.state(index)[slot][name], tensor) for name, tensor in params.items())
    assert [run.record(i).hypers for i in range(6)] == [whole.record(i).hypers for i in range(6)]
    assert run.rule == whole.rule
    assert lo.check_run(run.path) == []


@pytest.mark.parametrize("name", [name for name, kind in optimizers().items() if kind.torch_class is not None])
def test_a_tensor_learning_rate_is_followed_to_the_ninth_digit(name: str, tmp_path: Path) -> None:
    make = make_of(f"{name}, plain", lr=torch.tensor(0.01))
    steps, task = steps_of(make), task_of(make)
    run = recorded(tmp_path / "run", make)
    scores = lo.Replay().score(run, task, data_for("mlp", 4, 1), displacements=True)
    truth = torch.stack([steps.retrained(k, 0.0) - steps.final for k in range(6)])
    close(flat(scores, list(run.rule.groups)), truth, 1e-9)
    number = recorded(tmp_path / "number", make_of(f"{name}, plain", lr=float(torch.tensor(0.01))))
    one, two = (lo.SGDIE().score(at, task, data_for("mlp", 4, 1)).values for at in (run, number))
    close(one, two, 1e-3)  # its derivative is taken, too
