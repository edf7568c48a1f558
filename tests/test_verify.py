"""A check keeps everything it found, in memory and on disk."""

import json
import shutil
from dataclasses import replace

import pandas as pd
import pytest
import torch

import leaveout as lo
from leaveout._util.files import read_json, write_json
from leaveout.evaluate.metrics import compare
from problems import recorded
from refusal import refused


@pytest.fixture(scope="module")
def check(tmp_path_factory) -> lo.Check:
    problem = recorded(tmp_path_factory.mktemp("run") / "run", "logistic", n=12)
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query)
    return lo.verify(scores, problem.run, problem.task, problem.query, replays=10)


def assert_same(one: lo.Check, other: lo.Check) -> None:
    pd.testing.assert_frame_equal(one.table, other.table, check_exact=True)
    for sample in ("extreme", "random"):
        mine, its = getattr(one, sample), getattr(other, sample)
        pd.testing.assert_frame_equal(mine.to_frame(), its.to_frame(), check_exact=True)
        assert list(mine.jaccard) == list(its.jaccard)
    assert repr(one.spread) == repr(other.spread)  # NaN is equal to itself in print only
    assert (one.method, one.cost, one.sentence) == (other.method, other.cost, other.sentence)


def test_saving_and_loading_keeps_everything(check, tmp_path):
    path = check.save(tmp_path / "checks" / "sgd-ie.json")
    assert path == tmp_path / "checks" / "sgd-ie.json"
    assert_same(lo.Check.load(str(path)), check)
    assert [file.name for file in path.parent.iterdir()] == ["sgd-ie.json"]
    assert json.loads(path.read_text())["sentence"] == str(check)


def test_a_table_on_disk_is_the_frame(check, tmp_path):
    read = pd.read_csv(check.to_csv(tmp_path / "check.csv"), index_col="train")
    pd.testing.assert_frame_equal(read, check.to_frame())


def test_swapped_arguments_are_named(check):
    with refused(lo.InputError, "scores-expected", "call verify(scores, run, task, query)"):
        lo.verify("runs/x", check, None, None)


def test_a_check_of_before_does_not_say_its_run(check, tmp_path):
    told = read_json(check.save(tmp_path / "new.json"))
    assert told.pop("run_fingerprint") == check.run_fingerprint is not None
    write_json(tmp_path / "old.json", told)
    older = lo.Check.load(tmp_path / "old.json")
    assert older.run_fingerprint is None
    assert_same(older, check)


def test_what_is_not_a_number_survives_in_strict_json(check, tmp_path):
    table = check.table.assign(truth=0.25)
    flat = compare(table["score"], table["truth"], percents=(50, 12.5))  # a constant truth has no order
    odd = replace(check, random=flat, spread={"extreme": 0.5, "random": float("nan")}, table=table)
    path = odd.save(tmp_path / "odd.json")
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert_same(lo.Check.load(path), odd)


def test_scores_in_float32_give_a_table_in_float64(tmp_path):
    problem = recorded(tmp_path / "run", "logistic", n=12)
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query)
    single = replace(scores, values=scores.values.to(torch.float32))
    table = lo.verify(single, problem.run, problem.task, problem.query, replays=8).table
    assert table.dtypes.astype(str).to_dict()["score"] == "float64"


def test_a_check_on_disk_is_replaced_only_when_told(check, tmp_path):
    path = check.save(tmp_path / "check.json")
    before = path.read_bytes()
    with refused(lo.InputError, "file-exists", "overwrite=True"):
        replace(check, method="other").save(path)
    assert path.read_bytes() == before
    replace(check, method="other").save(path, overwrite=True)
    assert lo.Check.load(path).method == "other"


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}", b"\xff\xfe", b'{"table": 3}', b"[" * 100_000])
def test_other_files_are_refused(content, tmp_path):
    path = tmp_path / "check.json"
    if content is not None:
        path.write_bytes(content)
    with refused(lo.RunError, "check-unreadable", "Check.save"):
        lo.Check.load(path)


def test_a_file_with_a_part_missing_is_refused(check, tmp_path):
    told = json.loads(check.save(tmp_path / "check.json").read_text())
    for key in ("method", "extreme", "random", "spread", "cost", "table"):
        write_json(tmp_path / "part.json", {k: v for k, v in told.items() if k not in (key, "crc32")})
        with refused(lo.RunError, "check-unreadable", key):
            lo.Check.load(tmp_path / "part.json")
    write_json(tmp_path / "part.json", {**{k: v for k, v in told.items() if k != "crc32"}, "spread": {"random": 1.0}})
    with refused(lo.RunError, "check-unreadable", "extreme"):
        lo.Check.load(tmp_path / "part.json")


def test_scores_are_held_against_their_own_run_only(tmp_path):
    problem = recorded(tmp_path / "run", "logistic", n=12)
    other = recorded(tmp_path / "other", "logistic", n=12, seed=1)
    file = lo.SGDIE().score(problem.run, problem.task, problem.query).save(tmp_path / "scores.safetensors")
    scores = lo.Scores.load(file)
    assert scores.run_fingerprint == problem.run.fingerprint != other.run.fingerprint
    moved = lo.open_run(shutil.copytree(problem.run.path, tmp_path / "elsewhere"))
    for run in (problem.run, problem.run.interpolated(), moved):
        scores.check_same_run(run)
    lo.verify(scores, moved, problem.task, problem.query, replays=8)
    for run in (other.run, problem.run.head(2)):
        with refused(lo.InputError, "scores-of-another-run"):
            lo.verify(scores, run, problem.task, problem.query, replays=8)
        with refused(lo.InputError, "scores-of-another-run"):
            lo.refine(scores, run, problem.task, problem.query, top=2)
        with refused(lo.InputError, "scores-of-another-run"):
            lo.rounding(scores, lo.SGDIE(), run, problem.task, problem.query)
        with refused(lo.InputError, "scores-of-another-run"):
            lo.report(tmp_path / "page.html", run, scores)
    assert not (tmp_path / "page.html").exists()


def test_scores_of_each_query_are_said_to_be_compared_by_their_mean(tmp_path):
    problem = recorded(tmp_path / "run", "logistic", n=12)
    args = (problem.run, problem.task, problem.query)
    check = lo.verify(lo.SGDIE().score(*args, queries="each"), *args, replays=10)
    count = len(problem.query)
    truth = lo.Replay().score(*args, queries="each", ids=check.table.index.tolist()).values.mean(1)
    assert check.table["truth"].tolist() == pytest.approx(truth.tolist(), abs=1e-12)
    assert f"exact replays of the mean over {count} queries: " in check.sentence
    assert lo.Check.load(check.save(tmp_path / "check.json")).sentence == check.sentence


def test_where_nothing_moves_no_move_is_replayed_and_nothing_is_blamed(tmp_path):
    digits = lo.data.load("digits", n_train=30, n_val=10)
    task = lo.Task(torch.nn.Linear(64, 10), torch.nn.CrossEntropyLoss(), digits.train)
    run = lo.train(task, torch.optim.SGD(task.model.parameters(), lr=0.0), 2, 10, 0, tmp_path / "run")
    for method in (lo.SGDIE(), lo.Replay()):
        check = lo.verify(method.score(run, task, digits.val), run, task, digits.val, replays=12)
        assert check.ceiling is None
        assert "none of the replays changes the query loss; train with a learning rate above zero" in str(check)
        assert "nan" not in str(check)
        assert check.short == "no example has any effect"
        assert lo.Check.load(check.save(tmp_path / f"{check.method}.json")).void
