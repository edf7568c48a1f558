"""Hugging Face data sets: as training set and query, and with scores as columns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leaveout as lo

datasets = pytest.importorskip("datasets")


def table(count: int = 6):
    order = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, generator=order)
    return datasets.Dataset.from_dict({"x": x.tolist(), "y": [i % 2 for i in range(count)]}).with_format("torch")


def scored():
    return lo.Scores(torch.tensor([[0.5, 1.0], [-1.0, 0.0]]), (4, 1), ("a", "b"), "SGDIE")


def test_rows_are_examples(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for batch in recorder.watch(torch.utils.data.DataLoader(table(), 3, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
    task = lo.Task(model, nn.CrossEntropyLoss(), table(), forward=lambda model, batch: (model(batch["x"]), batch["y"]))
    scores = lo.SGDIE().score(recorder.finish(), task, table(3))
    assert scores.to_dataset(table())["influence"][:] == pytest.approx(scores.mean().tolist())


def test_a_frame_carries_chosen_columns() -> None:
    frame = scored().to_frame(table(), columns=["y"])
    assert frame["y"].tolist() == [0, 1]
    assert frame["a"].tolist() == [0.5, -1.0]
    assert list(scored().to_frame().columns) == ["a", "b"]


def test_a_data_set_has_the_scores_of_its_rows() -> None:
    data = scored().to_dataset(table(), column="score")
    assert data.column_names == ["x", "y", "score"]
    column = [row["score"] for row in data.with_format(None)]
    assert column == [None, -0.5, None, None, 0.75, None]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: scored().to_frame(table(), columns=["z"]), "columns-missing"),
        (lambda: scored().to_frame(columns=["y"]), "columns-missing"),
        (lambda: scored().to_frame(table(3), columns=["y"]), "rows-missing"),
        (lambda: scored().to_dataset(table(3)), "rows-missing"),
        (lambda: scored().to_dataset([1, 2]), "columns-missing"),
        (lambda: scored().to_dataset(table(), column="y"), "column-there"),
    ],
)
def test_what_does_not_fit_is_refused(call, code: str) -> None:
    with pytest.raises(lo.LeaveoutError) as error:
        call()
    assert error.value.code == code
