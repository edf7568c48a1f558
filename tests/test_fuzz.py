"""Anything may be given: it works, or it is refused with a LeaveoutError; nothing else is raised."""

import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)
METHODS = (lo.SGDIE(), lo.ACC("free"), lo.ACC("exact"), lo.TracIn(), lo.Replay((0,)))


@st.composite
def cases(draw: st.DrawFn) -> dict:
    return {
        "n": draw(st.integers(0, 5)),
        "width": draw(st.integers(0, 3)),
        "outputs": draw(st.integers(1, 2)),
        "model": draw(st.sampled_from(DTYPES[:4])),
        "inputs": draw(st.sampled_from((None, None, None, *DTYPES))),
        "targets": draw(st.sampled_from((None, None, *DTYPES))),
        "bad": draw(st.sampled_from((None, None, None, math.nan, math.inf))),
        "transposed": draw(st.booleans()),
        "device": draw(st.sampled_from(("cpu", "cpu", "cpu", "meta"))),
        "batch": draw(st.integers(-1, 4)),
        "queries": draw(st.integers(0, 2)),
        "method": draw(st.sampled_from(METHODS)),
    }


def examples(case: dict, n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case["width"], n, generator=generator).T if case["transposed"] else torch.randn(n, case["width"])
    y = torch.randn(n, case["outputs"], generator=generator)
    x = x.to(case["inputs"] or case["model"])
    if case["bad"] is not None and x.is_floating_point() and x.numel():
        x[-1, -1] = case["bad"]
    return TensorDataset(x, y.to(case["targets"] or case["model"]))


@settings(max_examples=60)
@given(cases())
def test_every_input_works_or_is_refused(case: dict) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = nn.Linear(max(case["width"], 1), case["outputs"]).to(case["model"]).to(case["device"])
            task = lo.Task(model, nn.MSELoss(), examples(case, case["n"]))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            run = lo.train(task, optimizer, 1, case["batch"], 0, Path(folder) / "run")
            scores = case["method"].score(run, task, examples({**case, "bad": None}, case["queries"]))
        except lo.LeaveoutError as error:
            refusal = str(error)
        else:
            assert bool(torch.isfinite(scores.values).all())
            return
    assert any(mark in refusal for mark in (": ", "; ", " must ")), refusal  # what is wrong, and what to do
    assert len(refusal) > 40


def with_nan(value: float) -> TensorDataset:
    x = torch.ones(8, 2)
    x[5, 1] = value
    return TensorDataset(x, torch.zeros(8, 1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_training_names_the_step_and_the_example(value: float, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    task = lo.Task(model, nn.MSELoss(), with_nan(value))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist()
    with pytest.raises(lo.RunError, match=rf"Step {order.index(5) // 2} has no finite loss, that of example 5 is NaN"):
        lo.train(task, torch.optim.SGD(model.parameters(), lr=0.1), 1, 2, 0, tmp_path / "run")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_users_own_loop_is_told_the_step_and_the_example(value: float, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(with_nan(value), 2)

    def loop() -> None:
        with lo.Recorder(tmp_path / "run", model, optimizer) as recorder:
            for x, y in recorder.watch(loader):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()

    with pytest.raises(lo.RunError, match=r"Step 2 made parameter .* example 5 of its batch holds NaN"):
        loop()
    assert len(lo.open_run(tmp_path / "run", partial=True)) == 2
