"""Labels to check: counts by hand, flipped digits that are found, duplicates, mixing influence, refusals."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.builtin import data, models
from leaveout.evaluate.duplicates import conflicts, input_hashes
from leaveout.evaluate.dynamics import MEMORISED
from leaveout.evaluate.labels import confident_count, influence_weight, robust
from leaveout.evaluate.metrics import Interval
from leaveout.task.classes import Reading, class_logits, margins, readings
from refusal import refused


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run on 400 digits, 40 of them flipped."""
    torch.set_num_threads(1)
    found = data.load("digits", 400, 60, seed=0)
    noisy = data.flip(found.train, 0.1, seed=1)
    model = models.build("mlp", seed=0, features=64, hidden=(16,), outputs=10, activation="tanh")
    task = lo.Task(model, nn.CrossEntropyLoss(), noisy.examples)
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.3), 20, 40, 0, tmp_path_factory.mktemp("d") / "run")
    return run, task, found, noisy


@pytest.fixture(scope="module")
def verified(digits):
    """Influence on clean queries, and what exact replays say of it."""
    run, task, found, _ = digits
    scores = lo.TracIn().score(run, task, found.val)
    return scores, lo.verify(scores, run, task, found.val, replays=8)


def test_flipped_digits_are_found_and_set_right(digits):
    run, task, found, noisy = digits
    answer = lo.labels(run, task)
    wrong = set(noisy.touched.nonzero().flatten().tolist())
    assert 30 <= len(answer) <= 55  # 40 were flipped
    assert len(wrong & set(answer.ids)) >= 32
    assert len(wrong & set(answer.ranked(40).index)) >= 32
    caught = [i for i in answer.ids if i in wrong]
    right = [answer.table["predicted_label"][i] == int(found.train.y[i]) for i in caught]
    assert sum(right) >= 0.8 * len(right)
    assert (answer.table["given_label"] == noisy.examples.y.numpy()).all()
    assert answer.table["label_score"].between(0, 1).all()
    issues = answer.issues
    assert issues["label_score"].is_monotonic_increasing
    assert (issues["why"] != "").all()
    assert (issues["given_label"] != issues["predicted_label"]).all()
    assert repr(answer) == f"Labels({len(answer)} of 400 look wrong)"
    assert str(answer).startswith(f"{len(answer)} of 400 labels look wrong (")


def test_they_are_saved_loaded_and_written_as_csv(digits, tmp_path):
    run, task, found, _ = digits
    answer = lo.labels(run, task, classes=[f"digit {c}" for c in found.classes])
    assert answer.table["given_label"].str.startswith("digit ").all()
    assert lo.Labels.load(answer.save(tmp_path / "labels.json")) == answer
    with refused(lo.InputError, "file-exists"):
        answer.save(tmp_path / "labels.json")
    read = pd.read_csv(answer.to_csv(tmp_path / "labels.csv"), index_col="train")
    assert list(read.columns[:4]) == ["is_label_issue", "label_score", "given_label", "predicted_label"]
    assert read["is_label_issue"].sum() == len(answer)
    frame = answer.to_frame()
    frame["label_score"] = 2.0
    assert answer.table["label_score"].max() < 1
    (tmp_path / "bad.json").write_text("{}")
    with refused(lo.RunError, "labels-unreadable"):
        lo.Labels.load(tmp_path / "bad.json")


def test_confident_learning_by_hand():
    # Thresholds: class 0 (.8 + .6 + .1) / 3 = .5, class 1 (.7 + .9 + .2) / 3 = .6, class 2 (.5) / 1 = .5.
    opinions = torch.tensor(
        [
            [0.8, 0.1, 0.1],  # 0, confidently 0
            [0.6, 0.4, 0.0],  # 0, confidently 0
            [0.1, 0.9, 0.0],  # 0, confidently 1: wrong
            [0.2, 0.7, 0.1],  # 1, confidently 1
            [0.1, 0.9, 0.0],  # 1, confidently 1
            [0.4, 0.2, 0.4],  # 1, confidently nothing
            [0.5, 0.0, 0.5],  # 2, which reaches its threshold as class 0 does: the first counts
        ]
    )
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    # Label 0: 1 of 3 confident ones, of 3. Label 1: 0 of 2, of 3. Label 2: 1 of 1, of 1.
    assert confident_count(opinions, labels) == 2
    opinions[6] = torch.tensor([0.4, 0.1, 0.5])
    assert confident_count(opinions, labels) == 1
    # Of four with label 0 (threshold about .4) three, then two are confident, one of them of class 1 (threshold .9).
    halved = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.05, 0.95], [0.5, 0.5], [0.1, 0.9]])
    halved[1], halved[3] = torch.tensor([0.7, 0.3]), torch.tensor([0.3, 0.7])
    assert confident_count(halved, torch.tensor([0, 0, 0, 0, 1])) == round(4 / 3)
    halved[1] = torch.tensor([0.4, 0.6])
    assert confident_count(halved, torch.tensor([0, 0, 0, 0, 1])) == 2


def test_a_class_that_nobody_has_is_no_trouble():
    opinions = torch.tensor([[0.9, 0.05, 0.05], [0.1, 0.1, 0.8]])
    assert confident_count(opinions, torch.tensor([0, 0])) == 0


def small(tmp_path, x, y, loss=None, model=None, epochs=10):
    torch.manual_seed(0)
    model = model or nn.Linear(x.shape[1], int(y.max()) + 1)
    task = lo.Task(model, loss or nn.CrossEntropyLoss(), TensorDataset(x, y))
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.5), epochs, 8, 0, tmp_path / "run")
    return run, task


def test_the_same_input_with_two_labels_is_an_issue(tmp_path):
    torch.manual_seed(0)
    y = torch.arange(40) % 2
    x = torch.randn(40, 3) + 3 * (2 * y[:, None] - 1)
    x[7], x[9] = x[4], x[11]  # 4 has label 0 and 7 label 1; 9 and 11 are both 1
    run, task = small(tmp_path, x, y)
    answer = lo.labels(run, task)
    assert answer.table["conflicts_with"].dropna().to_dict() == {4: 7, 7: 4}
    assert answer.table["is_label_issue"][[4, 7]].tolist() == [False, True]
    assert answer.table["why"][7] == "same input as 4, which is labelled 0"
    assert conflicts(task, run.final()["param"], y, lo.Resources()) == {4: 7, 7: 4}


def test_inputs_are_told_apart_whatever_the_batch_looks_like():
    x, y = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 3.0]]), torch.tensor([0, 1, 0])
    mask = torch.tensor([[True], [False], [True]])
    for batch in ([x, y], {"x": x, "labels": y}, (x, x, y.clone())):
        a, b, c = input_hashes(batch, y).tolist()
        assert a == b != c
    assert len(set(input_hashes([x, mask, y], y).tolist())) == 3
    assert len(set(input_hashes([x.int(), y], y).tolist())) == 2
    assert input_hashes({"x": x, "name": ["a", "b", "c"], "labels": y}, y) is None
    column = [torch.tensor([[1.0, 2.0]])[:, 1], y[:1]]  # a batch of one, from a collator that takes a column
    assert input_hashes(column, y[:1]) == input_hashes([torch.tensor([2.0]), y[:1]], y[:1])


@pytest.mark.parametrize("kind", ["logit", "probability", "column"])
def test_two_classes_by_one_output(tmp_path, kind):
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(60) % 2
    x = torch.randn(60, 2, generator=generator) + 4 * truth[:, None]
    y = truth.float()
    y[:6] = 1 - y[:6]
    layers, loss = [nn.Linear(2, 1), nn.Flatten(0)], nn.BCEWithLogitsLoss()
    if kind == "probability":
        layers, loss = [*layers, nn.Sigmoid()], nn.BCELoss()
    if kind == "column":
        layers, y = layers[:1], y[:, None]
    run, task = small(tmp_path, x, y, loss, nn.Sequential(*layers))
    answer = lo.labels(run, task)
    assert set(answer.ranked(6).index) == set(range(6))
    assert set(answer.ids) <= set(range(8))
    assert len(answer) >= 5
    assert answer.table["predicted_label"][:6].tolist() == truth[:6].tolist()


def test_readings_of_outputs():
    z, y = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([1.0, 0.0, 0.0])
    logistic = nn.functional.binary_cross_entropy_with_logits(z, y, reduction="none")
    assert readings(z, y, logistic) == {Reading.LOGIT}
    assert readings(z.sigmoid(), y, logistic) == {Reading.PROBABILITY}
    assert readings(z, y, 3 * logistic) == set()
    rows, kinds = torch.randn(3, 4), torch.tensor([0, 3, 1])
    assert readings(rows, kinds, torch.ones(3)) == {Reading.CLASSES}
    for targets in (kinds + 1, kinds - 1, kinds.double(), torch.zeros(3, 4), [0, 1, 2], kinds == 1):
        assert readings(rows, targets, torch.ones(3)) == set()
    gap = margins(class_logits(Reading.LOGIT, z), torch.tensor([1, 0, 0]))
    assert gap.tolist() == pytest.approx([2.0, 1.0, -0.5])
    both = torch.tensor([0.0, 1.0])
    assert class_logits(Reading.PROBABILITY, both).isfinite().all()


@pytest.mark.parametrize("loss", ["numbers", "weighted", "soft"])
def test_what_has_no_labels_is_refused(tmp_path, loss):
    torch.manual_seed(0)
    x = torch.randn(16, 2)
    y, model, how = x[:, 0], nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), nn.MSELoss()
    if loss == "weighted":
        y, how = (x[:, 0] > 0).float(), nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))
    if loss == "soft":
        y, model, how = torch.rand(16, 3).softmax(1), nn.Linear(2, 3), nn.CrossEntropyLoss()
    run, task = small(tmp_path, x, y, how, model, epochs=1)
    with refused(lo.UnsupportedError, "labels-not-classes", str(list(y.shape))):
        lo.labels(run, task)


def test_influence_counts_as_far_as_it_is_trusted(digits, verified):
    (run, task, _, _), (scores, check) = digits, verified
    tau = Interval(0.9, 0.6, 1.0)
    parts = {name: replace(getattr(check, name), kendall=tau) for name in ("extreme", "random")}
    trusted = replace(check, **parts)
    assert influence_weight(trusted, 0.0) == pytest.approx(0.6)
    assert influence_weight(trusted, MEMORISED / 2) == pytest.approx(0.3)
    assert influence_weight(trusted, 2 * MEMORISED) == 0
    for low in (-0.2, math.nan):
        doubted = replace(trusted, random=replace(trusted.random, kendall=Interval(0.1, low, 0.4)))
        assert influence_weight(doubted, 0.0) == 0
    # This run has not memorised its labels, so that its margins are the better signal.
    plain, mixed = lo.labels(run, task), lo.labels(run, task, scores=scores, check=trusted)
    assert mixed.weight == 0
    assert mixed.table.equals(plain.table)
    assert mixed.question.influence == "TracIn"


def test_influence_is_added_where_every_label_is_fitted(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(24, 60), torch.arange(24) % 2
    run, task = small(tmp_path, x, y, epochs=30)
    query = TensorDataset(torch.randn(10, 60), torch.arange(10) % 2)
    scores = lo.Replay().score(run, task, query)
    check = lo.verify(scores, run, task, query, replays=8)
    plain = lo.labels(run, task, folds=None)
    mixed = lo.labels(run, task, scores=scores, check=check, folds=None)
    assert plain.misfit == 0
    assert "folds=5" in plain.sentence
    assert mixed.weight == influence_weight(check, 0.0) > 0.9
    both = robust(torch.tensor(plain.table["label_score"]).log()) + mixed.weight * robust(scores.mean().double())
    assert mixed.ranked().index.tolist() == both.argsort(stable=True).tolist()
    assert sorted(mixed.table["label_score"]) == pytest.approx(sorted(plain.table["label_score"]))
    assert lo.labels(run, task, scores=scores, folds=None).weight == 0  # nobody has verified them
    assert lo.labels(run, task, scores=scores, check=check).weight == 0  # trainings that did not see them say more


def test_memorised_labels_are_judged_out_of_sample_where_that_is_affordable(tmp_path, digits):
    torch.manual_seed(0)
    x, y = torch.randn(40, 60), torch.arange(40) % 2
    run, task = small(tmp_path, x, y, epochs=30)
    chosen, asked, never = lo.labels(run, task), lo.labels(run, task, folds=5), lo.labels(run, task, folds=None)
    assert chosen.table.equals(asked.table)
    assert not chosen.table.equals(never.table)
    assert chosen.issues["why"].str.startswith("held out, ").all()
    assert not never.table["why"].str.startswith("held out").any()
    assert (chosen.folds, asked.folds, never.folds) == (5, 5, None)
    assert chosen.misfit == asked.misfit == never.misfit == 0
    assert "judged by a training that did not see it (5 folds)" in chosen.sentence
    poor = replace(chosen, table=chosen.table.assign(predicted_label=1 - chosen.table["given_label"]))
    assert "The 5 retrained models agree with only 0.0% of the labels" in poor.sentence
    assert "look wrong to a weak model" in poor.sentence
    assert poor.doubtful
    assert "5 folds" not in asked.sentence  # which is what was asked for
    assert lo.Labels.load(chosen.save(tmp_path / "labels.json")) == chosen
    dear = lo.labels(run, task, budget=0.0)
    assert dear.table.equals(never.table)
    assert dear.folds is None
    assert dear.too_long > 0
    assert "folds=5 (--folds 5) judges them out of sample, in about 1 minute." in dear.sentence
    assert lo.Labels.load(dear.save(tmp_path / "dear.json")) == dear
    # The digits' run predicts nine tenths of its labels: it has not memorised them.
    assert lo.labels(*digits[:2]).folds is None
    with refused(lo.InputError, "folds-not-a-count", "folds='some'"):
        lo.labels(run, task, folds="some")


def test_scores_that_do_not_fit_are_refused(digits, verified):
    (run, task, found, _), (scores, check) = digits, verified
    with refused(lo.InputError, "check-without-scores", "scores="):
        lo.labels(run, task, check=check)
    part = lo.TracIn().score(run, task, found.val, ids=range(20))
    with refused(lo.InputError, "labels-scores-incomplete"):
        lo.labels(run, task, scores=part)
    with refused(lo.InputError, "check-of-other-scores"):
        lo.labels(run, task, scores=replace(scores, values=scores.values + 1), check=check)
    with refused(lo.InputError, "scores-of-another-run"):
        lo.labels(run, task, scores=replace(scores, run_fingerprint=1))
