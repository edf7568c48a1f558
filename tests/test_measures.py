"""Queries that ask something else than their loss: replays measure it, estimates predict it, signs are kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leaveout as lo
from leaveout.integrations.model_loss import ClassLoss
from leaveout.task.measures import correct, log_prob, margin, measure_of
from refusal import refused

MEASURES = {"margin": margin, "log_prob": log_prob, "correct": correct}


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    order = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, dtype=torch.float64, generator=order)
    y = (x @ torch.randn(4, 3, dtype=torch.float64, generator=order)).argmax(1)
    data = torch.utils.data.TensorDataset(x[:30], y[:30])
    query = torch.utils.data.TensorDataset(x[30:], y[30:])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    run = lo.train(task, torch.optim.SGD(model.parameters(), 0.3), 3, 6, 0, tmp_path_factory.mktemp("m") / "run")
    return run, task, query


def retrained(run, task, query, function, out, weight=0.0):
    """The mean of a function of outputs and targets after plain training with one example's weight changed."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model.load_state_dict(run.state(0)["param"])
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    x, y = task.train_set.tensors
    for index in range(len(run)):
        ids = run.record(index).ids
        weights = 1 + (weight - 1) * (ids == (-1 if out is None else out)).double()
        optimizer.zero_grad()
        (weights * nn.functional.cross_entropy(model(x[ids]), y[ids], reduction="none")).mean().backward()
        optimizer.step()
    with torch.no_grad():
        return float(function(model(query.tensors[0]), query.tensors[1]).mean())


@pytest.mark.parametrize("name", MEASURES)
def test_replays_measure_by_how_much_it_falls(problem, name) -> None:
    run, task, query = problem
    scores = lo.Replay().score(run, task.measuring(name), query, ids=[0, 5])
    base = retrained(run, task, query, MEASURES[name], None)
    truth = [base - retrained(run, task, query, MEASURES[name], k) for k in (0, 5)]
    assert scores.values.flatten().tolist() == pytest.approx(truth, abs=1e-10)
    assert scores.unit.startswith("fall of")


@pytest.mark.parametrize("name", ["margin", "log_prob"])
def test_sgdie_is_its_derivative(problem, name) -> None:
    run, task, query = problem
    scores = lo.SGDIE().score(run, task.measuring(name), query)
    h = 1e-5
    for k in (0, 5):
        up, down = (retrained(run, task, query, MEASURES[name], k, 1 + s) for s in (h, -h))
        assert float(scores.values[k, 0]) == pytest.approx((up - down) / (2 * h), rel=1e-5, abs=1e-9)


def test_log_probability_is_the_loss_turned_round(problem) -> None:
    run, task, query = problem
    for method in (lo.SGDIE(), lo.ACC(), lo.ACC(readout="outputs"), lo.SGDIE(direction="forward"), lo.TracIn()):
        own, loss = (method.score(run, t, query) for t in (task.measuring("log_prob"), task))
        assert torch.allclose(own.values, loss.values, rtol=1e-9)
        assert own.harmful(3) == loss.harmful(3)
        assert own.unit != loss.unit


def test_a_function_of_your_own(problem, tmp_path) -> None:
    run, task, query = problem
    own = lo.Task(task.model, task.loss, task.train_set, measure=lambda out, y: out.square().sum(1) + 0 * y)
    scores = lo.SGDIE().score(run, own, query)
    shared = lo.score([lo.SGDIE(), lo.ACC()], run, own, query)
    assert {one.unit for one in shared} == {scores.unit}
    check = lo.verify(scores, run, own, query, replays=10)
    assert check.extreme.rmse.value == check.extreme.rmse.value, "the error is in the same unit"
    assert scores.unit == "change of the query measure"
    scores.save(tmp_path / "s.safetensors")
    assert lo.Scores.load(tmp_path / "s.safetensors").unit == scores.unit


def test_what_has_no_derivative_or_no_name_is_refused(problem) -> None:
    run, task, query = problem
    with pytest.raises(lo.LeaveoutError) as error:
        lo.SGDIE().score(run, task.measuring("correct"), query)
    assert error.value.code == "measure-without-derivative"
    with pytest.raises(lo.LeaveoutError) as error:
        task.measuring("accuracy")
    assert error.value.code == "measure-unknown"
    for method in (lo.SGDIE(), lo.Replay()):
        with pytest.raises(lo.LeaveoutError) as error:
            method.score(run, task.measuring(lambda outputs, _targets: outputs.mean()), query)
        assert error.value.code == "measure-not-per-example"


def test_one_logit_for_two_classes() -> None:
    outputs, targets = torch.tensor([[2.0], [-1.0]]), torch.tensor([[1.0], [1.0]])
    assert margin(outputs, targets).tolist() == [2.0, -1.0]
    assert correct(outputs, targets).tolist() == [1.0, 0.0]
    assert log_prob(outputs, targets).exp().tolist() == pytest.approx(outputs.sigmoid().flatten().tolist())


@pytest.mark.parametrize("estimator", [lo.SGDIE(direction="forward"), lo.SGDIE(direction="backward"), lo.ACC("jump")])
@pytest.mark.parametrize("name", ["margin", "log_prob"])
def test_each_query_is_measured_alone(problem, name, estimator) -> None:
    run, task, query = problem
    each = estimator.score(run, task.measuring(name), query, queries="each").values
    for k in (0, 7):
        alone = torch.utils.data.Subset(query, [k])
        assert torch.allclose(each[:, k], estimator.score(run, task.measuring(name), alone).values[:, 0], atol=1e-12)


def test_tokens_that_do_not_count_are_not_measured() -> None:
    order = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 4, generator=order, dtype=torch.float64)  # examples, classes, tokens
    targets = torch.tensor([[1, 2, -100, -100], [0, -100, -100, -100], [4, 3, 2, 1]])
    for name, function in MEASURES.items():
        for row in range(3):
            values = []
            for token in range(4):
                if (target := int(targets[row, token])) < 0:
                    continue
                one = logits[row, :, token]
                rest = torch.cat([one[:target], one[target + 1 :]]).max()
                asked = {"margin": one[target] - rest, "log_prob": one.log_softmax(0)[target]}
                values.append(float(asked.get(name, (one[target] > rest).double())))
            assert float(function(logits, targets)[row]) == pytest.approx(sum(values) / len(values))


def recorded(model, loss, data, out):
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    recorder = lo.Recorder(out, model, optimizer)
    for x, y in recorder.watch(torch.utils.data.DataLoader(data, 6)):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return recorder.finish(), lo.Task(model, loss, data)


def test_probabilities_are_not_read_as_logits(tmp_path) -> None:
    order = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, dtype=torch.float64, generator=order)
    y = (x[:, :1] + torch.randn(30, 1, dtype=torch.float64, generator=order) > 0).double()
    torch.manual_seed(0)
    linear = nn.Linear(4, 1).double()
    data = torch.utils.data.TensorDataset(x, y)
    run, task = recorded(nn.Sequential(linear, nn.Sigmoid()), nn.BCELoss(), data, tmp_path / "run")
    scores = lo.Replay().score(run, task.measuring("log_prob"), data, ids=[0, 1]).values
    assert torch.allclose(scores, lo.Replay().score(run, task, data, ids=[0, 1]).values, atol=1e-12)
    params = dict(task.model.named_parameters())
    with torch.no_grad():
        signed = linear(x)[:, 0] * (2 * y[:, 0] - 1)
        assert torch.allclose(-task.measuring("margin").objective.measures(params, [x, y]), signed)
        assert torch.equal(-task.measuring("correct").objective.measures(params, [x, y]), (signed > 0).double())


def test_targets_that_the_loss_ignores_are_not_measured_and_classes_may_come_last() -> None:
    order = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 7, (5, 4), generator=order)
    tokens[:, 3] = 0
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7))
    task = lo.Task(model, nn.CrossEntropyLoss(ignore_index=0), torch.utils.data.TensorDataset(tokens, tokens))
    params = dict(model.named_parameters())
    with torch.no_grad():
        logits = model(tokens)
        for name in MEASURES:
            expected = []
            for row in range(5):
                values = []
                for token in range(3):  # the last one is ignored
                    one, target = logits[row, token], int(tokens[row, token])
                    rest = torch.cat([one[:target], one[target + 1 :]]).max()
                    asked = {"margin": one[target] - rest, "log_prob": one.log_softmax(0)[target]}
                    values.append(float(asked.get(name, (one[target] > rest).double())))
                expected.append(sum(values) / 3)
            measured = -task.measuring(name).objective.measures(params, [tokens, tokens])
            assert measured.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("shift", [True, False])
def test_tokens_of_language_models_are_measured_where_their_loss_is(shift) -> None:
    """As many tokens as words: the shape does not say which dimension is which."""
    tokens = torch.randint(0, 6, (4, 6 + shift), generator=torch.Generator().manual_seed(0))
    tokens[0, 4:] = -100
    loss = ClassLoss(shift=shift)
    logits = torch.randn(4, 6 + shift, 6, generator=torch.Generator().manual_seed(1))
    sums, counts = loss(logits, tokens)
    assert torch.allclose(measure_of("log_prob", loss)(logits, tokens), sums / counts, atol=1e-6)
    right = (logits.argmax(2)[:, :6] == tokens[:, shift:]).double().sum(1) / counts
    assert torch.allclose(-measure_of("correct", loss)(logits, tokens).double(), right, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "target"),
    [(nn.MSELoss(), lambda z: z), (nn.CrossEntropyLoss(), lambda z: z.softmax(1))],
    ids=["regression", "soft labels"],
)
def test_what_has_no_classes_has_no_margin(loss, target, tmp_path) -> None:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, target(x[:, :3]))
    run, task = recorded(nn.Linear(4, 3), loss, data, tmp_path / "run")
    for name in MEASURES:
        with refused(lo.UnsupportedError, "measure-needs-classes", name):
            lo.Replay().score(run, task.measuring(name), data, ids=[0])


def test_scores_of_one_measure_are_not_compared_with_replays_of_another(problem) -> None:
    run, task, query = problem
    scores = lo.SGDIE().score(run, task.measuring("margin"), query)
    assert scores.sign == "positive: the query margin would fall without this example; it helped"
    assert lo.average([scores, scores]).sign == scores.sign
    for ask in (lo.verify, lo.refine, lo.metrics.tsloo, lo.metrics.lds):
        with refused(lo.InputError, "measures-differ", "fall of the query margin"):
            ask(scores, run, task, query)
    check = lo.verify(scores, run, task.measuring("margin"), query, replays=8)
    truth = lo.Replay().score(run, task.measuring("margin"), query).values[:, 0]
    assert check.table["truth"].tolist() == pytest.approx(truth[check.table.index.tolist()].tolist(), abs=1e-12)
