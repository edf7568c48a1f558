"""Cleansing against a plain PyTorch loop that trains again without the removed examples."""

import copy
import json
import tempfile
import warnings
import zlib
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout._util.files import unsealed, write_json
from leaveout.evaluate.curve import paired, wilson
from problems import recorded, shuffled, with_least_memory
from refusal import refused


def plainly(problem, loss, removed: set[int], batches: list[list[int]], test, l2: float) -> tuple[float, float]:
    """Test loss and error after an ordinary loop over the batches in which removed examples count for nothing."""
    model = copy.deepcopy(problem.task.model)
    with torch.no_grad():
        for name, value in problem.run.state(0)["param"].items():
            model.get_parameter(name).copy_(value)
    for step, ids in enumerate(batches):
        kept = [i for i in ids if i not in removed]
        hypers = problem.run.record(step).hypers
        total = sum(
            loss(model(problem.train.tensors[0][[i]]), problem.train.tensors[1][[i]])
            + 0.5 * l2 * sum(p.square().sum() for p in model.parameters())
            for i in kept
        )
        names = dict(model.named_parameters())
        found = torch.autograd.grad(total / len(ids), list(names.values())) if kept else [0.0] * len(names)
        with torch.no_grad():
            for (name, param), gradient in zip(names.items(), found, strict=True):
                param -= hypers[problem.run.rule.groups[name]]["lr"] * gradient
    x, y = test.tensors
    with torch.no_grad():
        outputs = model(x)
        guess = outputs.argmax(1) if outputs.ndim == 2 else (outputs > 0).double()
        return float(loss(outputs, y)), float((guess != y).double().mean())


@pytest.fixture(scope="module", params=["logistic", "conv"])
def case(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("cleanse")
    batches = shuffled(12, 5, 3)
    problem = recorded(path / "run", request.param, n=12, batches=batches)
    loss, l2 = {"logistic": (nn.BCEWithLogitsLoss(), 0.05), "conv": (nn.CrossEntropyLoss(), 0.01)}[request.param]
    return problem, loss, l2, batches


def test_the_curve_is_that_of_plain_retraining(case):
    problem, loss, l2, batches = case
    scores = [
        lo.SGDIE().score(problem.run, problem.task, problem.query),
        lo.TracIn().score(problem.run, problem.task, problem.query),
    ]
    curve = lo.cleanse(scores, problem.run, problem.task, problem.query, [4, 1], random=2, seed=3)
    table = curve.table.set_index(["choice", "removed", "draw"])
    assert len(table) == 1 + 2 * 2 + 2 * 2
    for method in scores:
        order = method.mean().argsort(stable=True).tolist()
        for m in (1, 4):
            expected = plainly(problem, loss, set(order[:m]), batches, problem.query, l2)
            row = table.loc[(method.method, m, 0)]
            assert (row["loss"], row["error"]) == pytest.approx(expected, abs=1e-10)
    assert table.loc[("nothing", 0, 0), "loss"] == pytest.approx(
        plainly(problem, loss, set(), batches, problem.query, l2)[0], abs=1e-10
    )
    drawn = table.loc["random"]["loss"]
    assert drawn.nunique() > 1
    again = lo.cleanse(scores, problem.run, problem.task, problem.query, [4, 1], random=2, seed=3)
    assert again.table.equals(curve.table)
    ask = partial(lo.cleanse, scores, problem.run, problem.task, problem.query, [4, 1], random=2, seed=3)
    small = with_least_memory(lambda resources: ask(resources=resources))
    assert np.allclose(small.table["loss"], curve.table["loss"], atol=1e-12)


def test_only_harmful_examples_are_removed(case, tmp_path):
    problem, loss, l2, batches = case
    values = torch.tensor([[0.5], [-1.0], [0.0], [-2.0], *[[0.1 * (i + 1)] for i in range(8)]])
    few = lo.Scores(values, tuple(range(12)), ("mean",), "few")
    many = lo.Scores(-values, tuple(range(12)), ("mean",), "many")
    with pytest.warns(lo.LeaveoutWarning, match=r"Fewer than 5 examples are harmful \(2 by few\)"):
        curve = lo.cleanse([few, many], problem.run, problem.task, problem.query, [1, 4, 5], random=1)
    removed = {str(choice): sorted(part["removed"]) for choice, part in curve.table.groupby("choice")}
    assert removed == {"nothing": [0], "few": [1, 2], "many": [1, 4, 5], "random": [1, 2, 4, 5]}
    expected = plainly(problem, loss, {1, 3}, batches, problem.query, l2)
    row = curve.table.set_index(["choice", "removed"]).loc[("few", 2)]
    assert (row["loss"], row["error"]) == pytest.approx(expected, abs=1e-10)
    assert curve.harmful == {"few": 2, "many": 9}
    assert "Without all 2 harmful by few the test " in str(curve)
    assert lo.Curve.load(curve.save(tmp_path / "curve.json")).harmful == curve.harmful
    good = lo.Scores(values.abs(), tuple(range(12)), ("mean",), "good")
    with refused(lo.InputError, "nothing-harmful"):
        lo.cleanse(good, problem.run, problem.task, problem.query, [1])


def test_random_choices_are_what_they_say(case):
    problem, loss, l2, batches = case
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query)
    curve = lo.cleanse(scores, problem.run, problem.task, problem.query, [2], random=3)
    for _, row in curve.table[curve.table["choice"] == "random"].iterrows():
        drawn = torch.randperm(12, generator=torch.Generator().manual_seed(int(row["draw"])))[:2].tolist()
        assert row["loss"] == pytest.approx(
            plainly(problem, loss, set(drawn), batches, problem.query, l2)[0], abs=1e-10
        )


def test_where_few_were_scored_the_control_is_of_these(case):
    problem, loss, l2, batches = case
    some = [1, 4, 6, 9, 10]
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query, ids=some)
    curve = lo.cleanse(scores, problem.run, problem.task, problem.query, [1], random=8)
    expected = {plainly(problem, loss, {k}, batches, problem.query, l2)[0] for k in some}
    for value in curve.table[curve.table["choice"] == "random"]["loss"]:
        assert min(abs(value - one) for one in expected) < 1e-10


def test_fresh_orders_train_on_permuted_examples(case):
    problem, loss, l2, batches = case
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query)
    worst = int(scores.harmful(1)[0])
    curve = lo.cleanse(scores, problem.run, problem.task, problem.query, [1], random=1, shuffles=2)
    assert curve.batches == "shuffled"
    table = curve.table.set_index(["choice", "order"])
    for order in (0, 1):
        drawn = torch.Generator().manual_seed(order)
        epochs = [torch.randperm(12, generator=drawn).tolist() for _ in batches[::2]]  # of two steps in these runs
        mixed = [[epochs[step // 2][i] for i in ids] for step, ids in enumerate(batches)]
        for choice, removed in (("nothing", set()), (scores.method, {worst})):
            expected = plainly(problem, loss, removed, mixed, problem.query, l2)
            assert (table.loc[(choice, order), "loss"], table.loc[(choice, order), "error"]) == pytest.approx(
                expected, abs=1e-10
            )


@pytest.mark.filterwarnings("ignore:The test set is the training set")
def test_every_epoch_has_a_fresh_order_and_sees_every_example_once(tmp_path, monkeypatch):
    model = nn.Linear(3, 1).double()
    data = TensorDataset(torch.randn(10, 3).double(), torch.randn(10, 1).double())
    task = lo.Task(model, nn.MSELoss(), data)
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.1), 3, 4, 0, tmp_path / "run")
    scores = lo.SGDIE().score(run, task, data)
    read, seen = task.read, []
    monkeypatch.setattr(task, "read", lambda ids, dataset=None: (seen.append(list(ids)), read(ids, dataset))[1])
    curve = lo.cleanse(scores, run, task, data, [1], random=0, shuffles=1)
    steps = [ids for ids in seen if len(ids) in (2, 4)][-9:]
    epochs = [[*steps[i], *steps[i + 1], *steps[i + 2]] for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert curve.table["error"].isna().all()  # regression has no classes
    assert "test loss" in str(curve)


def test_intervals(case):
    problem, *_ = case
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query)
    curve = lo.cleanse(scores, problem.run, problem.task, problem.query, [2], random=4)
    frame = curve.to_frame().set_index("choice")
    drawn = curve.table[curve.table["choice"] == "random"]["loss"].to_numpy()
    low, high = stats.t.interval(0.95, 3, drawn.mean(), stats.sem(drawn))
    assert (frame.loc["random", "loss_low"], frame.loc["random", "loss_high"]) == pytest.approx((low, high))
    one = curve.table.set_index("choice").loc[scores.method]
    assert frame.loc[scores.method, "loss_high"] - one["loss"] == pytest.approx(1.959964 * one["loss_se"])
    assert frame.loc["random", "trainings"] == 4
    assert "nothing removed" in str(curve)
    assert scores.method in str(curve)


def test_wilson_is_scipys_and_stays_within_bounds():
    for wrong, count in ((0, 20), (3, 20), (20, 20), (7, 397)):
        ci = stats.binomtest(wrong, count).proportion_ci(method="wilson")
        assert wilson(wrong / count, count) == pytest.approx((ci.low, ci.high), abs=1e-12)


@pytest.mark.parametrize(("only_before", "only_after"), [(0, 0), (5, 1), (2, 9)])
def test_a_paired_difference_of_errors_is_agresti_and_mins(only_before, only_after):
    count = 60
    change = np.zeros(count)
    change[:only_before], change[only_before : only_before + only_after] = -1, 1
    b, c, n = only_before + 0.5, only_after + 0.5, count + 2
    middle, half = (c - b) / n, stats.norm.ppf(0.975) * np.sqrt(b + c - (c - b) ** 2 / n) / n
    ends = paired(change.mean(), change.std(ddof=1) / np.sqrt(count), count)
    assert ends == pytest.approx((middle - half, middle + half), abs=1e-12)


def test_changes_are_compared_in_pairs(case):
    problem, *_ = case
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query)
    worst = [int(i) for i in scores.harmful(2)]
    curve = lo.cleanse(scores, problem.run, problem.task, problem.query, [2], random=0)
    # The losses of the query examples by models that were replayed, one at a time, without both examples and with all.
    each = lo.Replay().score(problem.run, problem.task, problem.query, groups=[worst], queries="each").values[0]
    row = curve.changes().set_index("choice").loc[scores.method]
    error = float(each.std() / len(each) ** 0.5)
    assert row["loss"] == pytest.approx(float(each.mean()), abs=1e-10)
    assert row["loss_high"] - row["loss"] == pytest.approx(1.959964 * error, rel=1e-6)
    assert row["measurable"] == (row["error_high"] < 0 or row["error_low"] > 0)
    assert "in pairs" in str(curve)
    several = lo.cleanse(scores, problem.run, problem.task, problem.query, [2], random=0, shuffles=3)
    table = several.table.set_index(["choice", "order"])["loss"]
    pairs = (table[scores.method] - table["nothing"]).to_numpy()
    low, high = stats.t.interval(0.95, 2, pairs.mean(), stats.sem(pairs))
    row = several.changes().set_index("choice").loc[scores.method]
    assert (row["loss_low"], row["loss_high"]) == pytest.approx((low, high))


def test_random_choices_of_one_order_do_not_count_as_independent():
    """Of simulated trainings, each with noise of its own, 95% of the intervals hold the mean difference, 0."""
    order, held, curves, orders, draws = np.random.default_rng(0), 0, 400, 3, 5
    for _ in range(curves):
        base, drawn = order.normal(size=orders), order.normal(size=(orders, draws))
        rows = [("nothing", 0, o, 0, base[o]) for o in range(orders)]
        rows += [("random", 2, o, o * draws + d, drawn[o, d]) for o in range(orders) for d in range(draws)]
        table = pd.DataFrame(rows, columns=["choice", "removed", "order", "draw", "loss"])
        table[["loss_se", "error", "error_se", "loss_change_se", "error_change_se"]] = np.nan
        row = lo.Curve(table, "shuffled", 100, lo.Cost()).changes().iloc[0]
        assert row["trainings"] == orders * draws
        held += row["loss_low"] <= 0 <= row["loss_high"]
    assert stats.binomtest(int(held), curves, 0.95).pvalue > 1e-3


def test_a_change_that_any_removal_may_bring_is_said_to_be_one():
    """Scores of noise change the error of this training by more than its interval; random removals do so as well."""
    digits = lo.data.load("digits", n_train=200, n_val=20)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    task = lo.Task(model, nn.CrossEntropyLoss(), digits.train)
    with tempfile.TemporaryDirectory() as out:
        run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.5), 6, 50, 0, f"{out}/run")
        order = torch.Generator().manual_seed(0)
        ids = tuple(range(200))
        noise = [lo.Scores(torch.randn(200, 1, generator=order), ids, ("mean",), f"noise {i}") for i in range(12)]
        curve = lo.cleanse(noise, run, task, digits.test, [10])
    changes = curve.changes()
    noise_rows, drawn = changes[changes["choice"] != "random"], curve.table[curve.table["choice"] == "random"]
    assert noise_rows["measurable"].mean() > 0.5, "a training that no removal changes tests nothing"
    assert (noise_rows["measurable"] & ~noise_rows["usual"]).mean() <= 0.1
    values = (drawn["error"] - curve.table["error"].iloc[0]).to_numpy()
    half = stats.t.ppf(0.975, 4) * values.std(ddof=1) * np.sqrt(6 / 5)
    for _, row in noise_rows.iterrows():
        assert row["usual"] == (abs(row["error"] - values.mean()) <= half)
        said = "within the range of random removals" in curve.change(row["choice"], 10)
        assert said == (row["usual"] and row["measurable"])
    assert not changes["usual"].iloc[-1], "random removals are not compared with themselves"


def test_labels_that_look_wrong_are_removed(tmp_path):
    digits = lo.data.load("digits", n_train=80, n_val=20)
    noisy = lo.data.flip(digits.train, 0.1, seed=1).examples
    torch.manual_seed(0)
    task = lo.Task(nn.Linear(64, 10), nn.CrossEntropyLoss(), noisy)
    run = lo.train(task, torch.optim.SGD(task.model.parameters(), lr=0.5), 4, 20, 0, tmp_path / "run")
    labels = lo.labels(run, task)
    ranking = labels.to_scores()
    assert ranking.harmful(len(labels)) == labels.ids
    assert ranking.harmful_count == len(labels)
    curve = lo.cleanse(labels, run, task, digits.test, [3], random=0)
    without = lo.Replay().score(run, task, digits.test, groups=[labels.ids[:3]])
    assert curve.choices == ["labels"]
    assert curve.changes()["loss"].iloc[0] == pytest.approx(float(without.values[0, 0]), abs=1e-6)


def test_a_change_in_words():
    rows = {"choice": ["nothing", "ACC"], "removed": [0, 5], "order": [0, 0], "draw": [0, 0]}
    rows |= {"loss": [0.5, 0.4], "loss_se": [0.1, 0.1], "error": [0.3, 0.1], "error_se": [0.05, 0.05]}
    rows |= {"loss_change_se": [0.0, 0.02], "error_change_se": [0.0, 0.02]}
    curve = lo.Curve(pd.DataFrame(rows), "recorded", 400, lo.Cost())
    assert curve.change("ACC", 5) == "falls by 20.0 points (16.0 to 23.8)"
    same = replace(curve, table=curve.table.assign(error=[0.3, 0.31]))
    assert same.change("ACC", 5) == "does not change measurably, +1.0 points (-2.9 to +4.9)"
    words = "does not change measurably, +1.0 points (-2.9 to +4.9)"
    first = f"Without the 5 most harmful examples by ACC the test error {words}"
    assert str(same).startswith(f"{first}: 30.00% → 31.00%.\n"), "the answer comes first"
    assert repr(same) == "Curve(test error of 400 examples without 5 by ACC)"
    low = replace(curve, table=curve.table.assign(error=[0.0, 0.0], error_se=[0.0, 0.0])).to_frame()
    assert (low["error_low"] >= 0).all()
    assert (low["error_high"] > 0).all(), "none wrong of 400 does not mean that none ever is"


def test_saved_and_loaded(case, tmp_path):
    problem, *_ = case
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query)
    curve = lo.cleanse(scores, problem.run, problem.task, problem.query, [2], random=1)
    file = curve.save(tmp_path / "deep" / "curve.json")
    back = lo.Curve.load(file)
    assert back.table.equals(curve.table)
    assert (back.batches, back.test_size, back.cost) == (curve.batches, curve.test_size, curve.cost)
    assert back.run_fingerprint == problem.run.fingerprint
    before = file.read_text()
    told = json.loads(before)
    older = {name: told[name] for name in told if name not in ("crc32", "run_fingerprint")}
    write_json(tmp_path / "older.json", older)
    assert lo.Curve.load(tmp_path / "older.json").run_fingerprint is None
    with refused(lo.InputError, "file-exists", "overwrite=True"):
        curve.save(file)
    assert file.read_text() == before
    curve.save(file, overwrite=True)
    told = unsealed(json.loads(before))
    table = told["table"]
    without = {key: value for key, value in table.items() if key != "loss"}
    strange = [{**table, "choice": ["all"] * 4}, {**table, "removed": ["few"] * 4}, {**table, "removed": [None] * 4}]
    for changes in (*({"table": odd} for odd in (without, *strange)), {"test_size": float("inf")}):
        other = {**told, **changes}
        words = json.dumps(other, sort_keys=True, separators=(",", ":"))
        file.write_text(json.dumps({**other, "crc32": zlib.crc32(words.encode())}))
        with refused(lo.RunError, "curve-unreadable", "Curve.save"):
            lo.Curve.load(file)
    file.write_text("[" * 100_000)
    with refused(lo.RunError, "curve-unreadable", "Curve.save"):
        lo.Curve.load(file)


def test_nonsense_is_refused(case):
    problem, *_ = case
    run, task, query = problem.run, problem.task, problem.query
    scores = lo.SGDIE().score(run, task, query)
    groups = lo.SGDIE().score(run, task, query, groups=[[0, 1], [2]])
    foreign = replace(scores, run_fingerprint=1)
    for given, options, code in (
        (scores, {"remove": [0]}, "remove-out-of-range"),
        (scores, {"remove": [13]}, "remove-out-of-range"),
        (scores, {"remove": []}, "remove-out-of-range"),
        (scores, {"remove": [1], "random": -1}, "trainings-not-a-count"),
        (groups, {"remove": [1]}, "groups-cannot-be-removed"),
        (foreign, {"remove": [1]}, "scores-of-another-run"),
        ([], {"remove": [1]}, "cleanse-without-scores"),
        ([scores, scores], {"remove": [1]}, "methods-repeated"),
    ):
        with refused(lo.InputError, code):
            lo.cleanse(given, run, task, query, **options)


@pytest.mark.parametrize("which", ["query", "train", "copy"])
def test_a_test_set_that_was_seen_is_said_to_be_none(case, tmp_path, which):
    problem = case[0]
    sets = {"query": problem.query, "train": problem.task.train_set, "copy": TensorDataset(*problem.train.tensors)}
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query)
    with pytest.warns(lo.LeaveoutWarning, match="the query set" if which == "query" else "the training set"):
        curve = lo.cleanse(scores, problem.run, problem.task, sets[which], [1], random=0)
    assert lo.Curve.load(curve.save(tmp_path / "curve.json")).seen == curve.seen
    page = lo.report(tmp_path / "page.html", problem.run, scores, curve=curve)
    assert f"no test: they are {curve.seen}" in page.read_text()
    half = TensorDataset(*(tensor[:-1] for tensor in problem.query.tensors))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lo.cleanse(scores, problem.run, problem.task, half, [1], random=0).seen == ""
