"""Refusals that need nothing but a call: each with its code and what it names."""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import leaveout as lo
from experiments.reproduce import SPECS, runner
from experiments.reproduce.report import check_extras
from leaveout.builtin import config, models
from leaveout.builtin.config import ModelPart, OptimizerPart
from leaveout.compute import engines
from leaveout.evaluate.metrics.linear_datamodel import random_subsets
from leaveout.reporting.show import _row
from leaveout.task.draws import note
from problems import Problem, recorded, shared
from refusal import refused


def optimizer(**part: Any) -> torch.optim.Optimizer:
    return config._optimizer(OptimizerPart(**part), nn.Linear(1, 1))


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "rank-not-a-count": (lambda: lo.Subspace(0), "rank=0"),
    "activation-unknown": (lambda: models.mlp(3, activation="rellu"), "did you mean relu?"),
    "model-too-deep": (lambda: models.mlp(3, hidden=[1] * 10_000), "10,000 layers"),
    "config-invalid": (lambda: config.from_dict({"modell": {}}, "config.toml"), "[modell]"),
    "optimizer-unknown": (lambda: optimizer(name="sdg"), "did you mean sgd?"),
    "optimizer-option-unknown": (lambda: optimizer(name="sgd", betas=[0.9, 0.99]), "betas"),
    "betas-not-two-numbers": (lambda: optimizer(name="adam", betas=[0.9]), "[0.9]"),
    "optimizer-rejects-options": (lambda: optimizer(name="sgd", lr=-1.0), "-1.0"),
    "subsets-not-drawable": (lambda: random_subsets(10, count=1, share=0.5), "subsets=1"),
    "memory-too-small": (lambda: lo.Resources(memory=1).check(10, "one row"), "10 bytes"),
    "feature-without-name": (lambda: _row(np.zeros(3), ["age"]), "3 values"),
    "generator-state-missing": (lambda: note(lambda: torch.rand(2, device="meta")), "meta"),
    "address-not-reachable": (lambda: lo.open_run("nowhere://run"), "nowhere://run"),
}


@pytest.mark.parametrize("code", CALLS)
def test_what_means_nothing(code: str) -> None:
    call, named = CALLS[code]
    with refused(lo.InputError, code, named):
        call()


@pytest.mark.parametrize(
    ("code", "name"), [("model-rejects-data", "mnist-cnn"), ("model-outputs-not-classes", "logistic")]
)
def test_models_that_do_not_fit_the_data(code: str, name: str) -> None:
    with refused(lo.InputError, code, f"The model {name}", "digits"):
        config._model(ModelPart(name=name), lo.data.load("digits", n_train=4, n_val=2))


@pytest.mark.parametrize(
    ("code", "content"),
    [("config-not-toml", "= 3"), ("config-too-large", "#" * (config.MOST_BYTES + 1)), ("config-unreadable", None)],
)
def test_files_that_are_no_config(code: str, content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    if content is not None:
        file.write_text(content)
    with refused(lo.InputError, code, str(file)):
        config.read(file)


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(lo.UnsupportedError, "extra-missing", "[ray]"):
        engines._ray()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with refused(lo.UnsupportedError, "packages-missing", "plotly", "requirements.txt"):
        check_extras()


@pytest.fixture
def problem() -> Problem:
    return shared("logistic", "sgd")


class Failing(Dataset):
    """Queries of which the third cannot be read."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int):
        if i == 2:
            raise KeyError("lost")
        return self.data[i]


def test_queries_without_a_loss(problem: Problem) -> None:
    x, y = problem.query.tensors
    broken = TensorDataset(torch.where(torch.arange(len(x))[:, None] == 2, torch.nan, x), y)
    with refused(lo.InputError, "query-loss-not-finite", "example 2"):
        lo.TracIn().score(problem.run, problem.task, broken)
    with refused(lo.InputError, "query-has-no-loss", "example 2", "lost"):
        lo.TracIn().score(problem.run, problem.task, Failing(problem.query))


def test_what_is_no_run_and_no_loader(problem: Problem, tmp_path: Path) -> None:
    with refused(lo.InputError, "run-expected", "str"):
        lo.TracIn().score("runs/own", problem.task, problem.query)
    model = nn.Linear(1, 1)
    recorder = lo.Recorder(tmp_path / "run", model, torch.optim.SGD(model.parameters(), 0.1))
    with refused(lo.InputError, "loader-expected", "list"):
        recorder.watch([1, 2])
    single = lo.TracIn().score(problem.run, problem.task, problem.query, queries="each")
    with refused(lo.InputError, "most-not-a-count", "most=0"):
        lo.metrics.brittleness(single, problem.run, problem.task, problem.query, most=0)
    with refused(lo.InputError, "subset-not-scored", "Subset 1", "999"):
        lo.metrics.algorithm_lds(single, [[0], [999]], np.zeros((1, 2, 4)))
    with refused(lo.InputError, "seeds-not-a-count", "seeds=0"):
        runner.compute(SPECS["convex"], tmp_path, seeds=0)
    with refused(lo.InputError, "sketch-not-usable", "positive width"):
        lo.ACC("exact", sketch=4).score(problem.run, problem.task, problem.query)


def test_pages_that_do_not_belong_together(problem: Problem, tmp_path: Path) -> None:
    run, task, query = problem.run, problem.task, problem.query
    scores = lo.TracIn().score(run, task, query, queries="each")
    page = tmp_path / "page.html"
    with refused(lo.InputError, "query-without-task", "task="):
        lo.report(page, run, scores, query=query)
    fewer = TensorDataset(*(tensor[:3] for tensor in query.tensors))
    with refused(lo.InputError, "query-count-differs", "4 queries"):
        lo.report(page, run, scores, task=task, query=fewer)
    with refused(lo.InputError, "score-not-finite", "NaN"):
        lo.report(page, run, replace(scores, values=scores.values * torch.nan), task=task, query=query)
    strange = replace(scores, train_ids=[i + 100 for i in scores.train_ids])
    with refused(lo.InputError, "scores-of-other-examples", scores.method):
        lo.cleanse(strange, run, task, query, [1])


def test_a_run_that_maximised_its_loss(tmp_path: Path) -> None:
    climbing = recorded(tmp_path / "run", "logistic", lambda m: torch.optim.SGD(m.parameters(), 0.1, maximize=True))
    with refused(lo.UnsupportedError, "not-a-minimum", "SGDIE()"):
        lo.InfluenceFunction().score(climbing.run, climbing.task, climbing.query)


def test_a_step_that_is_nan_when_it_is_computed_again(tmp_path: Path) -> None:
    """The batch was not shown to the recorder, which therefore cannot tell that the data have changed."""
    torch.manual_seed(0)
    x, y, model = torch.randn(4, 3), torch.randint(2, (4,)), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
        recorder.step([0, 1])
        nn.functional.cross_entropy(model(x[:2]), y[:2]).backward()
        optimizer.step()
    task = lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(x, y), check=False)
    x[0] = torch.nan
    with refused(lo.MismatchError, "step-recomputed-nan", "Step 0", "[0, 1]"):
        lo.Replay().score(lo.open_run(tmp_path / "run"), task, TensorDataset(x[2:], y[2:]), ids=[1])


def test_a_cluster_that_does_not_answer() -> None:
    pytest.importorskip("ray", reason="the extra leaveout[ray] is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"  # nobody listens there
    with refused(lo.EngineError, "cluster-not-found", address):
        lo.Ray(address)._connected()
