"""What a report says, against slower answers; what it refuses; and that it never loses a page that is there."""

import ast
import json
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout._util.png import pixels, png
from leaveout.evaluate.metrics import Interval
from leaveout.evaluate.opinions import opinions
from leaveout.evaluate.verdict import Verdict
from leaveout.reporting import rows
from leaveout.reporting.answer import answers
from leaveout.reporting.cleansing import cleansing
from leaveout.reporting.content import Trust
from leaveout.reporting.show import built_in, present
from leaveout.reporting.trust import trusted
from problems import recorded
from refusal import refused
from reports import EVIL, FEATURES, pictures, table, texts, trained

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
KINDS = torch.randint(3, (30,), generator=torch.Generator().manual_seed(1))


LEVELS = (("good", 0.8), ("coarse", 0.5), ("hint", 1e-9), ("none", -1))


def data(path: Path) -> dict:
    """What the page's script works with."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())[1])


def asked(model, loss, y, classes=()):
    task = lo.Task(model, loss, TensorDataset(X, y))
    params = {name: p.detach() for name, p in model.named_parameters()}
    return opinions(task, params, task.train_set, range(30), classes, lo.Resources()), model(X).detach()


@pytest.mark.parametrize("last", ["logits", "log-probabilities"])
def test_opinions_on_classes(last):
    linear = nn.Linear(4, 3)
    model, loss = (linear, nn.CrossEntropyLoss())
    if last == "log-probabilities":
        model, loss = nn.Sequential(linear, nn.LogSoftmax(1)), nn.NLLLoss()
    found, _ = asked(model, loss, KINDS, ("a", "b", "c"))
    scores = torch.exp(linear(X))
    own = (scores / scores.sum(1, keepdim=True))[torch.arange(30), KINDS]
    assert found.labels == ["abc"[i] for i in KINDS]
    assert found.says == ["abc"[max(range(3), key=lambda c: row[c])] for row in scores.tolist()]
    torch.testing.assert_close(found.p, own.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.losses, -own.log().double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("last", ["logit", "probability", "own callable"])
def test_opinions_on_two_classes(last):
    y = (KINDS == 1).float()
    linear = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    model, loss = linear, nn.BCEWithLogitsLoss()
    if last == "probability":
        model, loss = nn.Sequential(linear, nn.Sigmoid()), nn.BCELoss()
    elif last == "own callable":
        loss = lambda z, t: nn.functional.softplus(z) - t * z  # noqa: E731
    found, _ = asked(model, loss, y, ("no", "yes"))
    sure = 1 / (1 + torch.exp(-linear(X).detach()))
    torch.testing.assert_close(found.p, torch.where(y == 1, sure, 1 - sure).double(), rtol=1e-4, atol=1e-6)
    assert found.says == ["yes" if p > 0.5 else "no" for p in sure]
    assert found.labels == ["yes" if t else "no" for t in y]


def test_opinions_on_numbers_and_on_what_is_neither():
    y = X[:, 0]
    found, outputs = asked(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), nn.MSELoss(), y)
    assert found.p is None
    assert found.says == [f"{float(z):.4g}" for z in outputs]
    torch.testing.assert_close(found.losses, (outputs - y).square().double())
    # Squared errors on 0 and 1 are no probabilities, whatever the outputs are.
    zero_one, _ = asked(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), nn.MSELoss(), (KINDS == 1).float())
    assert zero_one.p is None
    several, _ = asked(nn.Linear(4, 2), nn.MSELoss(), X[:, :2])
    assert (several.labels, several.says, several.p) == ([], [], None)
    assert len(several.losses) == 30


def test_what_becomes_a_picture_a_text_or_a_row():
    assert present(torch.rand(3, 6, 5)).picture.startswith("data:image/png")
    assert present(np.zeros((9, 9, 3), np.uint8)).picture
    assert present("x" * 2000).text == "x" * 600 + " …"
    assert present({"name": "ann", "age": 3.14159}).row == (("name", "ann"), ("age", "3.142"))
    assert present(torch.tensor([5, 6, 7])).text == "5 6 7"
    wide = present(torch.arange(100.0))
    assert wide.row[0] == ("feature 99", "99")
    assert (len(wide.row), wide.more) == (8, 92)


@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 3), (7, 5, 4)])
def test_png_files_hold_the_pixels(tmp_path, shape):
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    (tmp_path / "it.png").write_bytes(png(image))
    read = pytest.importorskip("PIL.Image").open(tmp_path / "it.png")
    assert np.array_equal(np.asarray(read), image)


def test_large_pictures_are_averaged():
    image = np.arange(400 * 600 * 3).reshape(400, 600, 3) / (400 * 600 * 3)
    small = pixels(image, side=200)
    assert small.shape == (133, 200, 3)
    block = image[3:6, 30:33].mean((0, 1))
    assert np.abs(small[1, 10] / 255 - block).max() < 0.003


@pytest.fixture(scope="module")
def rowed(tmp_path_factory):
    return table(tmp_path_factory.mktemp("rowed"))


@pytest.fixture(scope="module")
def pictured(tmp_path_factory):
    return pictures(tmp_path_factory.mktemp("pictured"))


def test_the_page_carries_the_scores(pictured):
    report = pictured
    said = data(report.path)
    mean, first = report.mean, said["methods"][0]
    order = torch.argsort(mean, stable=True).tolist()
    assert said["table"]["id"] == order
    assert np.allclose(first["score"], mean[order].numpy(), rtol=1e-4)
    assert {i for i, exact in zip(order, first["exact"], strict=True) if exact} == set(report.check.table.index)
    counts, edges = first["histogram"]["counts"], first["histogram"]["edges"]
    assert sum(counts) == 160
    assert sum(c for c, right in zip(counts, edges[1:], strict=True) if right <= 0) == int((mean < 0).sum())
    when = lo.timeline(report.run, report.task, report.query)
    assert said["spans"] == list(when.spans) == ["epoch 1", "epoch 2", "epoch 3", "epoch 4"]
    for place, line in said["lines"].items():
        assert np.allclose(line, when.values[order[int(place)]].numpy(), rtol=1e-4, atol=1e-9)
    # The ten first and last, the first labels to check, whatever drives a query and what was replayed are shown.
    driving = {place for query in said["queries"] for place, _ in query["harmful"] + query["helpful"]}
    replayed = {order.index(i) for i in report.check.table.index}
    issues = set(said["issues"]["place"][:10])
    assert {int(place) for place in said["shown"]} == {*range(10), *range(150, 160), *driving, *replayed, *issues}
    worst = report.check.table["truth"].idxmin()
    assert f"Of the 16 that were replayed exactly, the most harmful is {worst} (labelled" in first["sentence"]
    assert (
        "trained on 160 examples for 4 epochs: 32 steps of SGD with learning rate 0.5 and batches of 20"
        in (said["summary"][0])
    )
    assert first["trust"]["sentence"] == report.check.sentence
    labels = report.task.train_set.tensors[1]
    for number, part in enumerate(first["parts"]):
        total = when.values[labels == number].sum(0).cumsum(0)
        assert np.allclose(part["growth"], total.numpy(), rtol=1e-3, atol=1e-6)
    assert [part["count"] for part in first["parts"]] == torch.bincount(labels).tolist()


def test_the_cleansing_curve_is_told(pictured):
    report = pictured
    lines = {line["name"]: line for line in data(report.path)["cleansing"]["lines"]}
    assert set(lines) == {"most harmful by ACC(free)", "at random"}
    assert all(line["x"] == [5, 20, 40] for line in lines.values())
    digits = lo.data.load("digits", n_train=160, n_val=12)
    again = lo.cleanse(report.scores, report.run, report.task, digits.test, remove=[5, 20, 40], random=2)
    for choice, name in (("ACC(free)", "most harmful by ACC(free)"), ("random", "at random")):
        for removed, value in zip(lines[name]["x"], lines[name]["y"], strict=True):
            chosen = again.table[(again.table["choice"] == choice) & (again.table["removed"] == removed)]
            assert value == pytest.approx(chosen["error"].mean(), rel=1e-4)
    # The number that is spoken of is the one nearest to the labels that look wrong, whatever it brought.
    wanted = len(lo.labels(report.run, report.task))
    removed = min([5, 20, 40], key=lambda amount: abs(amount - wanted))
    said = data(report.path)
    assert f"the {removed} most harmful examples by ACC(free)" in said["cleansing"]["sentence"]
    assert again.change("ACC(free)", removed) in said["cleansing"]["sentence"]
    assert f"Without the {removed} most " in said["answers"][1]["headline"]
    assert len(said["cleansing"]["changes"]) == 6


def test_the_cleansing_sentence_is_of_the_method_that_is_shown(pictured):
    report = pictured
    test = lo.data.load("digits", n_train=160, n_val=12).test
    other = lo.TracIn().score(report.run, report.task, report.query)
    both = lo.cleanse([report.scores, other], report.run, report.task, test, [5, 20], random=0)
    for shown in (report.scores.method, "TracIn"):
        assert f"examples by {shown}, the test error" in cleansing(both, shown, 5).sentence
    labels = lo.labels(report.run, report.task)
    three = lo.cleanse([labels, report.scores], report.run, report.task, test, [5], random=1)
    said = cleansing(three, report.scores.method, 5).sentence
    assert ["labels that look most wrong" in said, said.count("drawn at random")] == [True, 1], "the control once"
    only = cleansing(both, "SGD-IE", 5).sentence
    assert "nothing was removed by SGD-IE" in only


def test_what_does_not_change_measurably_is_said_to_be_so(pictured):
    report = pictured
    test = lo.data.load("digits", n_train=160, n_val=12).test
    few = TensorDataset(*test[:12])
    curve = lo.cleanse(report.scores, report.run, report.task, few, [1, 2], random=0)
    assert not curve.changes()["measurable"].any()
    answer = answers(None, curve, report.scores.method, Trust("good", "", "", ""), [-1.0] * 9, groups=False)[0]
    assert answer.headline == "Without the 2 most harmful examples: no measurable change"
    assert curve.interval(report.scores.method, 2) in answer.sentence


def said_of_the_worst(page: Path, truth: pd.Series) -> str:
    """The sentence that names the most harmful one; every row that was replayed must show what the replay gave."""
    said = data(page)
    method = said["methods"][0]
    for name, score, exact in zip(said["table"]["id"], method["score"], method["exact"], strict=True):
        assert exact == (name in truth.index)
        if exact:
            assert score == pytest.approx(truth[name], rel=1e-4)
    return method["sentence"]


@pytest.mark.parametrize("lower", [0.0, 1.0])  # by so much every estimate is too low: all examples seem to do harm
def test_a_replayed_value_stands_in_place_of_its_estimate_in_every_sentence(rowed, tmp_path, lower):
    wrong = replace(rowed.scores, values=rowed.scores.values * 90 - lower)
    check = lo.verify(wrong, rowed.run, rowed.task, rowed.query, replays=16)
    page = lo.report(tmp_path / "page.html", rowed.run, wrong, check, task=rowed.task)
    truth = check.table["truth"]
    sentence = said_of_the_worst(page, truth)
    assert f"ost harmful is {truth.idxmin()}" in sentence, "an estimate is not named beside exact values"
    assert f"falls by {-truth.min():.3g}, replayed exactly" in sentence
    assert ("Of the 16 that were replayed exactly" in sentence) == bool(lower)


def test_where_no_replay_found_harm_the_sentence_says_so(rowed, tmp_path):
    wrong = replace(rowed.scores, values=rowed.scores.values - 1.0)
    check = lo.verify(wrong, rowed.run, rowed.task, rowed.query, replays=16)
    kind = replace(check, table=check.table.assign(truth=check.table["truth"].abs() + 1e-3))
    page = lo.report(tmp_path / "page.html", rowed.run, wrong, kind, task=rowed.task)
    assert "but none of the 16 that were replayed exactly" in said_of_the_worst(page, kind.table["truth"])


@pytest.mark.skipif("LEAVEOUT_DATA" not in os.environ, reason="the files are where LEAVEOUT_DATA says")
def test_the_headline_about_adult_is_that_of_its_replays(tmp_path):
    adult = lo.data.load("adult", 200, 50)
    model = lo.models.build("mlp", seed=0, features=adult.train.x.shape[1], hidden=(8, 8), outputs=1)
    run, task = trained(tmp_path, model, nn.BCEWithLogitsLoss(), adult.train, epochs=10)
    scores = lo.ACC("free").score(run, task, adult.val)
    check = lo.verify(scores, run, task, adult.val, replays=16)
    truth, worst = check.table["truth"], scores.harmful(1)[0]
    assert abs(float(scores.mean()[worst]) - truth[worst]) > 0.1 * abs(truth[worst]), "the estimate is not the truth"
    page = lo.report(tmp_path / "page.html", run, scores, check, task=task, query=adult.val, show=built_in(adult))
    sentence = said_of_the_worst(page, truth)
    assert f"ost harmful is {truth.idxmin()} (labelled" in sentence
    assert f"falls by {-truth.min():.3g}, replayed exactly" in sentence


def test_one_methods_replays_serve_the_others(rowed, tmp_path):
    exact = lo.Replay((3, 5)).score(rowed.run, rowed.task, rowed.query)
    check = lo.verify(rowed.scores, rowed.run, rowed.task, rowed.query, replays=8)
    other = lo.ACC("exact").score(rowed.run, rowed.task, rowed.query)
    gradient = lo.TracIn(learning_rate=False).score(rowed.run, rowed.task, rowed.query)
    page = lo.report(tmp_path / "page.html", rowed.run, [rowed.scores, other, gradient], check)
    first, second, third = data(page)["methods"]
    assert first["exact"] == second["exact"]
    assert sum(second["exact"]) == 8
    assert not any(third["exact"]), "an inner product of gradients has no exact value to stand for it"
    with pytest.raises(lo.InputError) as refused:
        lo.report(tmp_path / "other.html", rowed.run, [rowed.scores, exact])
    assert refused.value.code == "scores-of-other-rows"
    for wrong, code in (([], "report-without-scores"), ([other, other], "methods-repeated")):
        with pytest.raises(lo.InputError) as refused:
            lo.report(tmp_path / "other.html", rowed.run, wrong)
        assert refused.value.code == code


def test_raw_rows_and_texts_stand_for_what_the_model_saw():
    adult = [
        {"age": 39, "workclass": "Private", "hours-per-week": 40},
        {"age": 50, "workclass": "?", "hours-per-week": 13},
    ]
    show = lo.Show(train=adult)
    assert show.shown(adult[1], 1).row == (("age", "50"), ("workclass", "?"), ("hours-per-week", "13"))
    assert show.shown({"text": "hello", "label": 1}).text == "hello", "an example with its target is shown by its text"
    assert lo.Show().shown("  ").text == "(empty)"


@pytest.mark.skipif("LEAVEOUT_DATA" not in os.environ, reason="the files are where LEAVEOUT_DATA says")
def test_built_in_tables_and_texts_keep_their_raw_rows():
    adult = lo.data.load("adult", 20, 20)
    flipped = lo.data.flip(adult.train, 0.5).examples
    shown = built_in(adult)
    for i in range(20):
        row = dict(shown.shown(shown.train[i], i).row)
        assert list(row)[:3] == ["age", "workclass", "fnlwgt"]
        assert row == {name: str(value) for name, value in flipped.raw[i].items()}
        # The age that the model sees is that age, standardised.
    ages = torch.tensor([float(raw["age"]) for raw in adult.train.raw])
    seen = adult.train.x[:, adult.features.index("age")]
    torch.testing.assert_close((ages - ages.mean()) / ages.std(correction=0), seen, rtol=1e-4, atol=1e-4)
    news = lo.data.load("20news", 20, 20)
    words = [word for word, value in zip(news.features, news.train.x[0], strict=True) if value > 0]
    assert all(word in news.train.raw[0].lower() for word in words)


def test_texts_rows_and_names_of_ones_own(rowed, tmp_path):
    names = [f"file-{i}.csv" for i in range(40)]
    frame = pd.DataFrame({"city": [f"city {i}" for i in range(40)], "age": range(40)})
    show = lo.Show(ids=names, text=[f"note {i}" for i in range(40)], row=frame)
    said = data(lo.report(tmp_path / "page.html", rowed.run, rowed.scores, task=rowed.task, show=show))
    for place, shown in said["shown"].items():
        number = said["table"]["id"][int(place)]
        assert shown["text"] == f"note {number}"
        assert shown["row"] == [["city", f"city {number}"], ["age", str(number)]]
        assert said["called"][place] == names[number]
    show = lo.Show(row=lambda example: {"first": float(example[0][0])}, text=None)
    said = data(lo.report(tmp_path / "other.html", rowed.run, rowed.scores, task=rowed.task, show=show))
    assert all(shown["row"][0][0] == "first" for shown in said["shown"].values())


def test_trust_is_the_worse_of_both_samples(pictured, tmp_path):
    report = pictured
    said = data(report.path)["methods"][0]["trust"]
    worst = min((report.check.extreme.kendall, report.check.random.kendall), key=lambda tau: tau.low)
    assert said["level"] == next(level for level, low in LEVELS if worst.low >= low)
    assert data(texts(tmp_path / "texts").path)["methods"][0]["trust"]["level"] == "unchecked"
    assert data(table(tmp_path / "groups", left_out="groups").path)["methods"][0]["trust"]["level"] == "unchecked"


def test_scores_of_groups(tmp_path):
    report = table(tmp_path, left_out="groups")
    said = data(report.path)
    assert said["groups"] is True
    assert set(said["table"]["id"]) == {f"source {EVIL}", "source b"}
    groups = {f"source {EVIL}": list(range(15)), "source b": list(range(15, 40))}
    when = lo.timeline(report.run, report.task, report.query, groups=groups)
    for place, line in said["lines"].items():
        row = when.train_ids.index(said["table"]["id"][int(place)])
        assert np.allclose(line, when.values[row].numpy(), rtol=1e-4)


def test_groups_that_the_scores_remember_and_their_check(tmp_path, rowed):
    groups = {f"source {i}": list(range(4 * i, 4 * i + 4)) for i in range(10)}
    scores = lo.ACC("exact").score(rowed.run, rowed.task, rowed.query, groups=groups)
    check = lo.verify(scores, rowed.run, rowed.task, rowed.query, replays=8)
    path = lo.report(tmp_path / "page.html", rowed.run, scores, check, task=rowed.task, query=rowed.query)
    said = data(path)
    assert {shown["text"] for shown in said["shown"].values()} == {"4 examples"}
    assert len(said["lines"]) == 10
    assert {point["id"] for point in said["methods"][0]["check"]["points"]} == set(check.table.index) <= set(groups)
    assert "without each of 8 groups" in path.read_text()


def test_scores_in_another_unit_are_not_called_changes_of_the_loss(tmp_path, rowed):
    scores = lo.TracIn(learning_rate=False).score(rowed.run, rowed.task, rowed.query)
    check = lo.verify(scores, rowed.run, rowed.task, rowed.query, replays=8)
    path = lo.report(tmp_path / "page.html", rowed.run, scores, check, task=rowed.task, query=rowed.query)
    said = data(path)
    assert "ranked every training example" in said["summary"][1]
    assert "inner product of gradients" in said["summary"][1]
    assert "loss would fall" not in said["methods"][0]["sentence"]
    assert not any("RMSE" in name for name, *_ in said["methods"][0]["check"]["measures"])
    assert "only their order can be right" in path.read_text()
    assert "the estimate is right" not in path.read_text()


def test_scores_of_examples_for_themselves(tmp_path, rowed):
    scores = lo.SGDIE().self_influence(rowed.run, rowed.task)
    path = lo.report(tmp_path / "page.html", rowed.run, scores, task=rowed.task, query=rowed.query)
    said = data(path)
    assert "how its own loss would change" in said["summary"][1]
    assert said["queries"] == []
    assert said["lines"] == {}


def test_ids_and_scores_alone_make_a_page(tmp_path):
    problem = recorded(tmp_path / "run")
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query)
    path = lo.report(tmp_path / "deep" / "report.html", problem.run, scores)
    assert data(path)["table"]["id"] == scores.mean().argsort(stable=True).tolist()
    assert "labelled" not in data(path)["methods"][0]["sentence"]
    assert data(path)["issues"] is None


def test_many_rows_and_pictures_stay_within_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "LISTED", 20)
    monkeypatch.setattr(rows, "PICTURE_BYTES", 3000)
    report = pictures(tmp_path)
    said = data(report.path)
    mean = report.mean
    order = torch.argsort(mean, stable=True).tolist()
    assert set(order[:10] + order[-10:]) <= set(said["table"]["id"])
    assert len(said["table"]["id"]) < 160
    assert said["methods"][0]["score"] == sorted(said["methods"][0]["score"])
    assert sum(len(shown["picture"]) for shown in said["shown"].values()) <= 3000
    assert sum(part["count"] for part in said["methods"][0]["parts"]) == 160
    assert any("most extreme of 160" in note for note in said["notes"])
    assert any("Pictures beyond" in note for note in said["notes"])


def test_a_page_that_is_there_is_kept(tmp_path):
    report = texts(tmp_path)
    before = report.path.read_bytes()
    with refused(lo.InputError, "file-exists", "report.html", "overwrite=True"):
        lo.report(report.path, report.run, report.scores)
    with pytest.raises(ZeroDivisionError):
        lo.report(report.path, report.run, report.scores, task=report.task, show=lambda example: 1 / 0, overwrite=True)
    assert report.path.read_bytes() == before
    lo.report(report.path, report.run, report.scores, overwrite=True)
    assert report.path.read_bytes() != before
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["report.html"]


@pytest.mark.parametrize("name", ["file/page.html", "folder", "x" * 300, "x" * 300 + "/page.html", "/sys/page.html"])
def test_a_place_that_cannot_be_written_is_told_before_the_work(name, rowed, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    worked = lo.Show(example=lambda example: pytest.fail("it worked before it looked"))
    with refused(lo.RunError, "file-not-writable"):
        lo.report(tmp_path / name, rowed.run, rowed.scores, task=rowed.task, show=worked, overwrite=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


@pytest.mark.filterwarnings("ignore:std")
def test_a_single_test_example_has_no_interval(rowed, tmp_path):
    one = TensorDataset(*(tensor[:1] for tensor in rowed.query.tensors))
    curve = lo.cleanse(rowed.scores, rowed.run, rowed.task, one, remove=[2], random=2)
    lines = data(lo.report(tmp_path / "page.html", rowed.run, rowed.scores, curve=curve))["cleansing"]["lines"]
    assert [(line["name"], len(line["low"]), len(line["high"])) for line in lines] == [
        ("most harmful by SGD-IE", 0, 0),
        ("at random", 1, 1),
    ]
    broken = replace(curve, table=curve.table.assign(loss=float("nan")))
    refuse(rowed, tmp_path / "new", "values-not-finite", "leave the curve out", curve=broken)


def refuse(rowed, tmp_path, code, named, **given):
    path = tmp_path / "page.html"
    with refused(lo.InputError, code, named):
        lo.report(path, rowed.run, **{"scores": rowed.scores, "task": rowed.task, **given})
    assert not path.exists()


def test_refusals(rowed, tmp_path):
    said = partial(refuse, rowed, tmp_path)
    said("query-without-task", "task=", task=None, query=rowed.query)
    said("feature-without-name", "4 feature names for rows of 5 values", show=lo.Show(features=FEATURES[:4]))
    said("id-out-of-range", "Example 77 in group 'a'", show=lo.Show(groups={"a": [77]}))
    said("queries-differ", "give the query set", query=TensorDataset(*rowed.task.train_set[:5]))
    each = lo.SGDIE().score(rowed.run, rowed.task, rowed.query, queries="each")
    said("query-count-differs", "10 queries and the query set 5", scores=each, query=TensorDataset(*rowed.query[:5]))
    by_group = lo.SGDIE().score(rowed.run, rowed.task, rowed.query, groups={"a": [0], "b": [1]})
    by_group = replace(by_group, groups=None)  # as files of before have it
    unknown = lo.Show(groups={"a": [0]})
    said("group-not-shown", "Group 'b'", scores=by_group, query=rowed.query, show=unknown)
    check = lo.verify(rowed.scores, rowed.run, rowed.task, rowed.query, replays=8)
    other = lo.TracIn().score(rowed.run, rowed.task, rowed.query)
    said("check-of-other-scores", "of SGD-IE, the scores are of TracIn", scores=other, check=check)
    changed = replace(rowed.scores, values=rowed.scores.values * 1.01)
    said("check-of-other-scores", "of other scores by SGD-IE than these", scores=changed, check=check)
    foreign = replace(check, run_fingerprint=1)
    said("check-of-other-scores", "of other scores by SGD-IE than these", check=foreign)
    curve = lo.cleanse(rowed.scores, rowed.run, rowed.task, rowed.query, [1], random=0)
    said("curve-of-another-run", "cleansing curve", curve=replace(curve, run_fingerprint=1))
    with refused(lo.InputError, "top-not-a-count", "top=0"):
        lo.Show(top=0)


def test_exact_scores_show_no_estimates(rowed, tmp_path):
    exact = lo.Replay().score(rowed.run, rowed.task, rowed.query)
    check = lo.verify(exact, rowed.run, rowed.task, rowed.query, replays=8)
    page = lo.report(tmp_path / "page.html", rowed.run, exact, check, task=rowed.task, query=rowed.query)
    assert data(page)["methods"][0]["trust"]["level"] == "exact"
    assert data(page)["methods"][0]["check"] is None
    assert "Estimate against truth" not in page.read_text().split("<script")[0]


def test_groups_that_are_too_few_to_verify_are_to_be_replayed(rowed, tmp_path):
    scores = lo.SGDIE().score(rowed.run, rowed.task, rowed.query, groups={"a": [0, 1], "b": [2]})
    page = lo.report(tmp_path / "page.html", rowed.run, scores)
    assert "lo.Replay()" in data(page)["methods"][0]["trust"]["brief"]


def test_when_influence_arose_is_doubted_where_sgdie_ranks_otherwise(rowed, tmp_path):
    assert data(rowed.path)["timing"] == "", "SGD-IE agrees with itself"
    turned = replace(rowed.scores, values=-rowed.scores.values, method="turned")
    page = lo.report(tmp_path / "page.html", rowed.run, turned, task=rowed.task, query=rowed.query)
    words = "SGD-IE gives a different ranking from turned (tau -1.00)"
    assert data(page)["timing"].startswith(words)
    assert page.read_text().count(words) >= 2, "beside the cards too"


def test_labels_of_another_run_are_refused(tmp_path):
    run, task = trained(tmp_path, nn.Linear(4, 3), nn.CrossEntropyLoss(), TensorDataset(X, KINDS))
    other = replace(lo.labels(run, task), run_fingerprint=1)
    scores = lo.SGDIE().score(run, task, task.train_set)
    with refused(lo.InputError, "labels-of-another-run", "give those of this run"):
        lo.report(tmp_path / "page.html", run, scores, labels=other, task=task)


def test_every_class_needs_a_name(tmp_path):
    run, task = trained(tmp_path, nn.Linear(4, 3), nn.CrossEntropyLoss(), TensorDataset(X, KINDS))
    scores = lo.SGDIE().score(run, task, TensorDataset(X, KINDS))
    with refused(lo.InputError, "class-without-name", "Class 2", "classes="):
        lo.report(tmp_path / "page.html", run, scores, task=task, show=lo.Show(classes=("a", "b")))


def test_the_page_is_made_without_torch():
    folder = Path(lo.__file__).parent / "reporting"
    for name in ("page.py", "content.py"):
        for node in ast.walk(ast.parse((folder / name).read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert all(n.split(".")[0] != "torch" for n in names), name
            assert all(not n.startswith("leaveout") or n == "leaveout.reporting.content" for n in names), name


def test_a_failed_training_mutes_every_score(tmp_path):
    digits = lo.data.load("digits", n_train=60, n_val=12)
    torch.manual_seed(0)
    run, task = trained(tmp_path, nn.Linear(64, 10), nn.CrossEntropyLoss(), digits.train, lr=1e-9)
    scores = lo.Replay().score(run, task, digits.val)
    said = data(lo.report(tmp_path / "page.html", run, scores, task=task, query=digits.val))
    trust = said["methods"][0]["trust"]
    assert (trust["level"], trust["headline"], trust["act"]) == ("none", "The training failed", "")
    assert "Every score is exact" not in json.dumps(said)
    assert [answer["level"] for answer in said["answers"] if answer["about"] != "labels"] == ["none", "none"]


def test_a_bad_verdict_mutes_the_list_and_says_what_to_do_instead(rowed, tmp_path):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    wrong = replace(rowed.scores, values=rowed.scores.values[order])
    check = lo.verify(wrong, rowed.run, rowed.task, rowed.query, replays=32, moves=0)
    assert check.verdict is Verdict.NONE
    assert not check.too_few
    said = data(lo.report(tmp_path / "page.html", rowed.run, wrong, check, task=rowed.task))
    removal, trust = said["answers"][-2:]
    assert removal["headline"] == "Which examples did harm cannot be told from this"
    assert removal["sentence"] == said["methods"][0]["trust"]["instead"] != ""
    assert "did harm" not in said["methods"][0]["sentence"]
    assert said["methods"][0]["trust"]["act"] == "exact", "what was retrained without is what it is"
    assert "tau" not in trust["sentence"], "figures are in the fold"
    assert "tau" in said["methods"][0]["trust"]["sentence"]


def test_too_few_replays_are_said_to_be_too_few(rowed):
    check = lo.verify(rowed.scores, rowed.run, rowed.task, rowed.query, replays=8, moves=0)
    wide = replace(check.extreme, kendall=Interval(0.33, -0.5, 1.0))
    check = replace(check, extreme=wide)
    assert check.verdict is Verdict.NONE
    assert check.too_few
    assert check.short == "8 replays are too few to tell"
    assert "verify with more" in check.sentence
    assert trusted(rowed.scores, check).headline == "Too few replays to tell"
    sure = replace(check, extreme=replace(wide, kendall=Interval(0.0, -0.2, 0.2)))
    assert not sure.too_few


def test_console_and_page_count_alike(rowed, tmp_path):
    study = lo.Study(rowed.run, rowed.task, rowed.query)
    scores = study.score(lo.TracIn())
    study.verify(scores, replays=16)
    method = data(study.report(tmp_path / "page.html"))["methods"][0]
    assert f"{method['harmful']} of 40 training examples" in str(study)


def test_scores_that_are_all_zero_are_no_good_news(rowed, tmp_path):
    nothing = replace(rowed.scores, values=torch.zeros_like(rowed.scores.values))
    answer = data(lo.report(tmp_path / "page.html", rowed.run, nothing))["answers"][0]
    assert (answer["headline"], answer["level"]) == ("No example had any effect", "none")
