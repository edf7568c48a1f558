"""Scores carry their identity: ids, sign, unit, method and cost, in memory and on disk."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout import Cost, InputError, Scores
from leaveout._util.files import write_tensors
from refusal import refused


def example() -> Scores:
    values = torch.tensor([[0.5, 0.1], [-1.0, -2.0], [0.25, 0.0], [-0.125, 3.0]], dtype=torch.float64)
    return Scores(
        values,
        (7, 3, 11, 0),
        (0, 1),
        "ACC(exact)",
        Cost(hvps=12, gradients=5, seconds=0.25, peak_memory=2**31),
        {"0.weight": torch.arange(24.0).reshape(4, 2, 3), "0.bias": -torch.ones(4, 2)},
    )


# Order and sign


def test_a_name_that_is_too_long_is_told(tmp_path):
    scores = lo.Scores(torch.zeros(1, 1), (0,), ("mean",), "SGD-IE")
    with refused(lo.RunError, "file-not-writable"):
        scores.save(tmp_path / ("x" * 300))


def test_helpful_and_harmful_are_ids_in_order_of_the_mean() -> None:
    scores = example()  # means 0.3, -1.5, 0.125, 1.4375
    assert scores.helpful(2) == [0, 7]
    assert scores.harmful(1) == [3]
    assert scores.helpful(3) == [0, 7, 11]
    assert scores.helpful(0) == scores.harmful(0) == []


def test_top_is_by_magnitude_of_the_mean_or_of_one_query():
    scores = example()
    assert scores.top(2).index.tolist() == [3, 0]
    assert scores.top(2)["score"].tolist() == [-1.5, 1.4375]
    assert scores.top(2, query=1).index.tolist() == [0, 3]
    assert not scores.top(4)["exact"].any()
    with refused(InputError, "query-not-scored", "query=9", "0, 1"):
        scores.top(query=9)


def test_scores_are_equal_by_their_values():
    assert example() == example()
    assert example() != replace(example(), values=example().values + 1)
    assert example() != replace(example(), displacements=None)
    assert example() != "scores"
    with pytest.raises(TypeError, match="unhashable"):
        hash(example())


def test_nobody_is_called_harmful_who_helped() -> None:
    scores = example()
    assert (scores.harmful_count, scores.helpful_count) == (1, 3)
    with pytest.warns(lo.LeaveoutWarning, match=r"1 of 4 rows are harmful: 1 are given, not 2"):
        assert scores.harmful(2) == [3]
    with pytest.warns(lo.LeaveoutWarning, match="3 of 4 rows are helpful"):
        assert scores.helpful() == [0, 7, 11]
    nothing = Scores(torch.zeros(3, 1), (0, 1, 2), ("mean",), "any")
    with pytest.warns(lo.LeaveoutWarning, match="0 of 3"):
        assert nothing.harmful(1) == []


@pytest.mark.filterwarnings("ignore::leaveout.LeaveoutWarning")
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30), st.integers(1, 40))
def test_ranking_agrees_with_sorting(values: list[float], k: int) -> None:
    ids = tuple(f"z{i}" for i in range(len(values)))
    scores = Scores(torch.tensor(values).unsqueeze(1), ids, ("mean",), "any")
    by_name = dict(zip(ids, values, strict=True))
    assert scores.helpful(k) == sorted((i for i in ids if by_name[i] > 0), key=lambda i: -by_name[i])[:k]
    assert scores.harmful(k) == sorted((i for i in ids if by_name[i] < 0), key=lambda i: by_name[i])[:k]


def test_positive_means_that_the_example_helped(tmp_path: Path) -> None:
    """Seven examples teach that the sign of x is the label; example 5 has the wrong label."""
    x = torch.tensor([[-2.0], [-1.5], [-1.0], [1.0], [1.5], [1.75], [2.0]], dtype=torch.float64)
    y = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64).unsqueeze(1)
    query = TensorDataset(torch.tensor([[-1.2], [1.2]], dtype=torch.float64), torch.tensor([[0.0], [1.0]]).double())
    model = nn.Linear(1, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    task = lo.Task(model, nn.BCEWithLogitsLoss(), TensorDataset(x, y))
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.5), 5, 7, seed=0, out=tmp_path / "run")
    for method in (lo.TracIn(), lo.SGDIE(), lo.ACC(transport="exact"), lo.Replay()):
        scores = method.score(run, task, query)
        assert scores.harmful(1) == [5], method
        assert scores.mean()[5] < 0 < scores.mean()[4], method
        assert 5 not in scores.helpful(scores.helpful_count)
        assert scores.sign.startswith("positive")
        assert scores.unit == "change of the query loss"


# Labels


def test_a_frame_is_labelled_by_ids_not_by_position() -> None:
    frame = example().to_frame()
    assert isinstance(frame, pd.DataFrame)
    assert frame.index.tolist() == [7, 3, 11, 0]
    assert frame.index.name == "train"
    assert frame.columns.tolist() == [0, 1]
    assert frame.columns.name == "query"
    assert frame.loc[3, 1] == -2.0
    assert frame.loc[0, 1] == 3.0
    assert frame.to_numpy().dtype == "float64"


def test_a_frame_of_groups_and_of_scores_that_need_gradients() -> None:
    scores = Scores(torch.ones(2, 1, requires_grad=True), ("ann", "bob"), ("mean",), "SGD-IE")
    frame = scores.to_frame()
    assert frame.loc["bob", "mean"] == 1.0
    assert frame.shape == (2, 1)


def test_the_repr_says_what_it_is() -> None:
    assert repr(example()) == "Scores(ACC(exact), 4 train x 2 query, change of the query loss)"


def test_printed_scores_begin_with_the_answer_and_say_what_to_do_next() -> None:
    scores = Scores(torch.tensor([[0.5], [-1.0], [0.1]]), (7, 3, 11), ("mean",), "SGD-IE")
    assert str(scores).splitlines() == [
        "SGD-IE: 1 of 3 training examples have a score below zero, 2 above.",
        "  most harmful: 3 (-1)",
        "  most helpful: 7 (+0.5), 11 (+0.1)",
        "These are estimates; verify compares them with exact replays. Positive: the query loss would rise without "
        "this example; it helped.",
    ]
    some = replace(scores, exact=torch.tensor([True, False, False]), groups={"7": [0]})
    assert "1 of 3 groups have a score below zero" in str(some)
    assert "1 of 3 scores are exact replays, the others are estimates." in str(some)
    assert "Every score is an exact replay." in str(replace(scores, exact=torch.ones(3, dtype=torch.bool)))
    assert "on average over 2 queries" in str(example())
    assert "most" not in str(replace(scores, values=torch.zeros(3, 1)))


def test_a_table_on_disk_is_the_frame(tmp_path: Path) -> None:
    path = example().to_csv(tmp_path / "scores.csv")
    assert pd.read_csv(path, index_col="train").to_numpy().tolist() == example().to_frame().to_numpy().tolist()
    with pytest.raises(lo.InputError, match="exists already"):
        example().to_csv(path)


# On disk


def assert_same(one: Scores, other: Scores) -> None:
    assert torch.equal(one.values, other.values)
    assert one.values.dtype == other.values.dtype
    for name in ("train_ids", "query_ids", "method", "cost", "sign", "unit"):
        assert getattr(one, name) == getattr(other, name), name
    assert [type(i) for i in one.train_ids] == [type(i) for i in other.train_ids]
    assert (one.displacements is None) == (other.displacements is None)
    for name, tensor in (one.displacements or {}).items():
        assert torch.equal(tensor, (other.displacements or {})[name]), name
    assert set(one.displacements or {}) == set(other.displacements or {})


def test_saving_and_loading_keeps_everything(tmp_path: Path) -> None:
    scores = example()
    assert scores.save(tmp_path / "new" / "scores.safetensors") == tmp_path / "new" / "scores.safetensors"
    assert_same(Scores.load(str(tmp_path / "new" / "scores.safetensors")), scores)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["scores.safetensors"]


def test_ids_of_groups_stay_strings(tmp_path: Path) -> None:
    scores = Scores(torch.randn(3, 1).half(), ("7", "Ångström", 'say "hi"\n'), ("mean",), "Replay")
    loaded = Scores.load(scores.save(tmp_path / "scores"))
    assert_same(loaded, scores)
    assert loaded.train_ids[0] == "7"
    assert loaded.displacements is None


def test_values_that_are_views_are_saved_as_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for number, values in enumerate((base.T, base[:, ::2], base[:1].expand(5, 4), base.clone().requires_grad_())):
        rows, columns = values.shape
        scores = Scores(values, tuple(range(rows)), tuple(range(columns)), "any")
        assert torch.equal(Scores.load(scores.save(tmp_path / str(number))).values, values)


def test_scores_of_a_run_survive_with_displacements_and_cost(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(9, 3), torch.randint(2, (9,)))
    model = nn.Linear(3, 2)
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.5), 2, 3, seed=0, out=tmp_path / "run")
    scores = lo.ACC(transport="exact").score(
        run, task, data, queries="each", groups={"ann": [0, 1, 2], "bob": [8]}, displacements=True
    )
    assert scores.train_ids == ("ann", "bob")
    assert scores.query_ids == tuple(range(9))
    assert scores.displacements is not None
    assert scores.displacements["weight"].shape == (2, 2, 3)
    assert scores.cost.hvps > 0
    assert scores.cost.seconds > 0
    assert scores.cost.peak_memory > 0
    assert_same(Scores.load(scores.save(tmp_path / "scores")), scores)
    before = (tmp_path / "scores").read_bytes()
    with refused(lo.InputError, "file-exists", "scores", "overwrite=True"):
        scores.save(tmp_path / "scores")
    assert (tmp_path / "scores").read_bytes() == before


def test_overwriting_is_by_request_and_whole(tmp_path: Path) -> None:
    file = example().save(tmp_path / "scores")
    other = Scores(torch.zeros(1, 1), (0,), ("mean",), "TracIn")
    assert_same(Scores.load(other.save(file, overwrite=True)), other)
    before = file.read_bytes()
    broken = Scores(torch.zeros(1, 1), (0,), ("mean",), "TracIn", displacements={"w": torch.eye(2).to_sparse()})
    with pytest.raises(Exception, match=r"(?i)sparse|layout|contiguous|storage"):
        broken.save(file, overwrite=True)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_what_holds_no_scores_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    write_tensors(tmp_path / "tensors", {"values": torch.ones(2, 2)})
    write_tensors(tmp_path / "garbled", {"values": torch.ones(2, 2)}, {"leaveout": "{"})
    write_tensors(tmp_path / "listed", {"values": torch.ones(2, 2)}, {"leaveout": "[]"})
    write_tensors(tmp_path / "valueless", {"a": torch.ones(2, 2)}, {"leaveout": "{}"})
    write_tensors(tmp_path / "wordless", {"values": torch.ones(2, 2)}, {"leaveout": "{}"})
    cut = example().save(tmp_path / "cut")
    cut.write_bytes(cut.read_bytes()[:-8])
    names = ["missing", *(file.name for file in sorted(tmp_path.iterdir()))]
    assert len(names) == 10
    for name in names:
        with refused(lo.RunError, "scores-unreadable", name, "Scores.save"):
            Scores.load(tmp_path / name)


# Shapes


@pytest.mark.parametrize(("rows", "columns"), [(3, 1), (2, 2), (1, 2), (0, 0)])
def test_a_shape_that_does_not_match_the_ids_is_refused(rows: int, columns: int) -> None:
    with refused(lo.InputError, "scores-shape", f"[{rows}, {columns}]", "2 training ids", "1 query ids"):
        Scores(torch.zeros(rows, columns), (0, 1), ("mean",), "ACC")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_has_no_place_in_a_ranking(value: float) -> None:
    with refused(InputError, "score-not-finite", "score of 7"):
        Scores(torch.tensor([[1.0, 0.0], [value, 0.0]]), (3, 7), (0, 1), "X")
