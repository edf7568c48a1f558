"""Averages of weights (EMA, SWA) as a slot of the state, compared with plain training that averages as well."""

from __future__ import annotations

import copy
import tempfile
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import leaveout as lo
from refusal import refused

IDS = [0, 3, 11]
ORDER = [torch.randperm(20, generator=torch.Generator().manual_seed(seed)).split(4) for seed in (1, 2)]
STEPS = [ids for epoch in ORDER for ids in epoch]


def data():
    order = torch.Generator().manual_seed(0)
    return torch.randn(20, 5, dtype=torch.float64, generator=order), torch.randint(3, (20,), generator=order)


def net(norm: bool) -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(6), nn.Tanh()] if norm else [nn.Tanh()]
    return nn.Sequential(nn.Linear(5, 6), *middle, nn.Linear(6, 3)).double()


class Own:
    """An average in the loop's own way: from the weights before the first step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module, self.decay = copy.deepcopy(model), decay

    def update_parameters(self, model: nn.Module) -> None:
        with torch.no_grad():
            for own, other in zip(self.module.parameters(), model.parameters(), strict=True):
                own.mul_(self.decay).add_(other, alpha=1 - self.decay)


def sgd(params):
    return torch.optim.SGD(params, 0.1, momentum=0.9)


CASES = {
    "EMA": (lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.7)), sgd, False, 1),
    "EMA, Adam, BatchNorm, buffers too": (
        lambda m: AveragedModel(m, avg_fn=get_ema_avg_fn(0.7), use_buffers=True),
        lambda params: torch.optim.Adam(params, 0.02, eps=1e-3),
        True,
        1,
    ),
    "SWA every second step, BatchNorm": (AveragedModel, sgd, True, 2),
    "own": (lambda m: Own(m, 0.7), sgd, False, 1),
}


def train(name: str, out: int = -1, weight: float = 0.0, path=None, stop=None, **options):
    build, optimizer_of, norm, every = CASES[name]
    model = net(norm)
    average, optimizer = build(model), optimizer_of(model.parameters())
    recorder = None
    if path is not None:
        given = 0.7 if name == "own" else average
        recorder = lo.Recorder(path, model, optimizer, average=given, **options)
    x, y = data()
    for number, ids in enumerate(STEPS):
        if recorder is not None and number < recorder.done:
            continue
        if number == stop:
            recorder.__exit__(KeyboardInterrupt, None, None)
            return None
        if recorder is not None:
            recorder.step(ids, [x[ids], y[ids]], epoch=number // 5)
        optimizer.zero_grad()
        rows = ids[ids != out] if norm and weight == 0 else ids
        losses = F.cross_entropy(model(x[rows]), y[rows], reduction="none")
        weights = torch.ones(len(rows), dtype=torch.float64)
        weights[rows == out] = weight
        (weights * losses).sum().div(4).backward()
        optimizer.step()
        if number % every == 0:
            average.update_parameters(model)
    return recorder.finish() if recorder is not None else average.module.eval()


def query():
    order = torch.Generator().manual_seed(9)
    x = torch.randn(6, 5, dtype=torch.float64, generator=order)
    return torch.utils.data.TensorDataset(x, torch.randint(3, (6,), generator=order))


def query_loss(model: nn.Module) -> float:
    x, y = query().tensors
    with torch.no_grad():
        return float(F.cross_entropy(model(x), y))


@lru_cache
def recorded(name: str):
    run = train(name, path=f"{tempfile.mkdtemp()}/run", keep=3 if "Adam" in name else "all")
    return run, lo.Task(net(CASES[name][2]), nn.CrossEntropyLoss(), torch.utils.data.TensorDataset(*data()))


@pytest.mark.parametrize("name", CASES)
def test_replay_is_training_and_averaging_without_the_example(name: str) -> None:
    run, task = recorded(name)
    scores = lo.Replay().score(run, task, query(), ids=IDS, at="average").values.flatten()
    base = query_loss(train(name))
    truth = [query_loss(train(name, k)) - base for k in IDS]
    assert scores.tolist() == pytest.approx(truth, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("name", ["EMA", "own"])
def test_sgdie_is_the_derivative_of_the_averaged_training(name: str) -> None:
    run, task = recorded(name)
    scores = lo.SGDIE().score(run, task, query(), at="average").values.flatten()
    h = 1e-5
    for k in IDS:
        up, down = (query_loss(train(name, k, 1 + s)) for s in (h, -h))
        assert float(scores[k]) == pytest.approx(-(up - down) / (2 * h), rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_forward_is_backward(name: str) -> None:
    run, task = recorded(name)
    methods = [lo.SGDIE, lo.TracIn] if "Adam" in name else [lo.SGDIE, lo.TracIn, lo.ACC]
    for kind in methods if "Batch" not in name else methods[:2]:
        forward, backward = (
            kind(direction=way).score(run, task, query(), ids=IDS, at="average").values
            for way in ("forward", "backward")
        )
        assert torch.allclose(forward, backward, rtol=1e-9, atol=1e-13)
        assert not torch.allclose(backward, kind().score(run, task, query(), ids=IDS).values, rtol=1e-3)


def test_exact_acc_over_one_step_is_the_real_effect() -> None:
    run, task = recorded("own")
    ids = run.record(0).ids.tolist()[:2]
    one = run.head(1)
    scores = lo.ACC("exact", readout="exact").score(one, task, query(), ids=ids, at="average").values.flatten()
    truth = lo.Replay().score(one, task, query(), ids=ids, at="average").values.flatten()
    assert torch.allclose(scores, truth, rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_a_recording_that_is_cut_short_goes_on_with_its_average(name: str, tmp_path) -> None:
    run, _ = recorded(name)
    keep = 3 if "Adam" in name else "all"
    train(name, path=tmp_path / "run", stop=7, keep=keep)
    again = train(name, path=tmp_path / "run", keep=keep, resume=True)
    for slot, params in run.final().items():
        assert all(torch.equal(tensor, again.final()[slot][key]) for key, tensor in params.items()), slot


def test_the_average_of_the_run_is_the_loops_own() -> None:
    for name in CASES:
        run, _ = recorded(name)
        module = train(name).state_dict()
        for key, tensor in run.final()["average"].items():
            assert torch.allclose(tensor, module[key], rtol=1e-12, atol=0), (name, key)


def test_everything_else_works_for_the_average(tmp_path) -> None:
    run, task = recorded("EMA")
    study = lo.Study(run.average(), task, query(), resources=lo.Resources(progress=False))
    scores = study.score(lo.ACC())
    study.verify(scores, replays=10)
    assert study.refine(scores, top=3).exact.sum() >= 3
    study.cleanse(test_set=query(), remove=[2], random=1)
    study.report(tmp_path / "page.html")


def averaging(path, average=None, **options):
    """A recorder of a fresh model, and a function that takes one step of its training."""
    model = net(False)
    averaged = None if average is None else average(model)
    optimizer = sgd(model.parameters())
    recorder = lo.Recorder(path, model, optimizer, average=averaged, **options)
    x, y = data()

    def step(number: int) -> None:
        ids = STEPS[number]
        recorder.step(ids, [x[ids], y[ids]])
        optimizer.zero_grad()
        F.cross_entropy(model(x[ids]), y[ids]).backward()
        optimizer.step()
        if averaged is not None:
            averaged.update_parameters(model)

    return recorder, step, averaged, model


def test_what_is_no_average_is_refused(tmp_path) -> None:
    for wrong in (1.0, -0.1, net(False)):
        with refused(lo.InputError, "average-unknown", unchanged=tmp_path):
            averaging(tmp_path / "run", lambda _, wrong=wrong: wrong)


def test_an_average_that_is_no_weighted_mean_is_refused_before_anything_is_recorded(tmp_path) -> None:
    def largest(averaged, new, _):
        return torch.maximum(averaged, new)

    with refused(lo.UnsupportedError, "average-not-linear", "get_ema_multi_avg_fn", unchanged=tmp_path):
        averaging(tmp_path / "run", lambda model: AveragedModel(model, avg_fn=largest))


def test_an_average_that_is_begun_anew_is_refused(tmp_path) -> None:
    _, step, averaged, _ = averaging(tmp_path / "run", AveragedModel)
    step(0)
    step(1)
    averaged.n_averaged.zero_()
    with refused(lo.UnsupportedError, "average-begun-anew", "another run"):
        step(2)


def test_an_average_that_is_updated_after_its_step_was_written_is_refused(tmp_path) -> None:
    recorder, step, averaged, model = averaging(tmp_path / "run", AveragedModel)
    step(0)
    recorder.flush()
    averaged.update_parameters(model)
    with refused(lo.UnsupportedError, "average-updated-late", "step 0", "flush()"):
        step(1)


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_goes_on_with_its_average_or_without_as_it_was_begun(begun: bool, tmp_path) -> None:
    recorder, step, _, _ = averaging(tmp_path / "run", AveragedModel if begun else None)
    step(0)
    recorder.__exit__(KeyboardInterrupt, None, None)
    other = None if begun else AveragedModel
    with refused(lo.MismatchError, "average-differs", "with average=" if begun else "without average="):
        averaging(tmp_path / "run", other, resume=True)


def test_there_is_no_average_of_a_run_that_was_recorded_without(tmp_path) -> None:
    recorder, step, _, model = averaging(tmp_path / "run")
    step(0)
    run = recorder.finish()
    with refused(lo.InputError, "average-not-recorded", "Recorder(average="):
        run.average()
    task = lo.Task(model, nn.CrossEntropyLoss(), torch.utils.data.TensorDataset(*data()))
    with refused(lo.InputError, "average-not-recorded"):
        lo.TracIn().score(run, task, query(), at="average")
