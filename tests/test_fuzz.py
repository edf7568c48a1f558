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
from refusal import refused

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
        "bad_query": draw(st.sampled_from((None, None, None, math.nan, math.inf))),
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


@settings(max_examples=2 * settings().max_examples)
@given(cases())
def test_every_input_works_or_is_refused(case: dict) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = nn.Linear(max(case["width"], 1), case["outputs"]).to(case["model"]).to(case["device"])
            task = lo.Task(model, nn.MSELoss(), examples(case, case["n"]))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            run = lo.train(task, optimizer, 1, case["batch"], 0, Path(folder) / "run")
            queries = examples({**case, "bad": case["bad_query"]}, case["queries"])
            scores = case["method"].score(run, task, queries)
        except lo.LeaveoutError as error:
            refusal = str(error)
        else:
            assert bool(torch.isfinite(scores.values).all())
            return
    assert any(mark in refusal for mark in (": ", "; ", " must ")), refusal  # what is wrong, and what to do
    assert len(refusal) > 40


class Words(nn.Module):
    """Integers in: the mean of the words' vectors, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.last = nn.Embedding(6, 3), nn.Linear(3, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.vectors(words).mean(1))


def sentences(words: list[list[int]], classes: list[int]) -> TensorDataset:
    return TensorDataset(torch.tensor(words).reshape(-1, 2), torch.tensor(classes))


numbers = st.integers(-1, 7)


@settings(max_examples=2 * settings().max_examples)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.tuples(st.tuples(numbers, numbers), st.integers(0, 3)), min_size=1, max_size=3),
    st.one_of(st.none(), st.lists(st.lists(numbers, max_size=3), max_size=3)),
    st.sampled_from(METHODS[:4]),
)
def test_any_ids_words_and_groups_work_or_are_refused(steps: list, asked: list, groups: list | None, method) -> None:
    """Examples may be in a batch twice, words and classes not exist, groups repeat, be empty or name nobody."""
    torch.manual_seed(0)
    model, order = Words(), torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randint(0, 6, (5, 2), generator=order), torch.randint(0, 2, (5,), generator=order))
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    query = sentences([list(words) for words, _ in asked], [label for _, label in asked])
    with tempfile.TemporaryDirectory() as folder:
        with lo.Recorder(Path(folder) / "run", model, optimizer) as recorder:
            for ids in steps:
                x, y = data[ids]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                recorder.step(ids, (x, y))
                optimizer.step()
        run = lo.open_run(Path(folder) / "run")
        possible = all(0 <= word < 6 for words, _ in asked for word in words) and all(y < 2 for _, y in asked)
        named = groups is None or (groups and all(group and all(0 <= i < 5 for i in group) for group in groups))
        if possible and named:
            scores = method.score(run, task, query, groups=groups)
            assert bool(torch.isfinite(scores.values).all())
            return
        with pytest.raises(lo.LeaveoutError, match=r".{40,}"):
            method.score(run, task, query, groups=groups)


def with_nan(value: float) -> TensorDataset:
    x = torch.ones(8, 2)
    x[5, 1] = value
    return TensorDataset(x, torch.zeros(8, 1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_training_names_the_step_and_the_example(value: float, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    task = lo.Task(model, nn.MSELoss(), with_nan(value))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist()
    with refused(lo.RunError, "step-not-finite", f"Step {order.index(5) // 2} ", "example 5"):
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

    with refused(lo.RunError, "step-not-finite", "Step 2", "example 5"):
        loop()
    assert len(lo.open_run(tmp_path / "run", partial=True)) == 2
