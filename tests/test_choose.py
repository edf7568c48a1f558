"""The method chosen by measurement, and averages over runs."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import rankdata
from torch import nn

import leaveout as lo
from leaveout.evaluate import choose as module
from leaveout.evaluate import selection
from problems import only_estimated
from refusal import refused


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Tiny inputs on which TracIn is far off: long training, so that later steps undo earlier ones."""
    found = lo.data.load("digits-1v7", 140, 30)
    model = nn.Sequential(nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 1), nn.Flatten(0)).double()
    parts = [lo.data.Examples(part.x.double(), part.y.double(), part.ids) for part in (found.train, found.val)]
    task = lo.Task(model, nn.BCEWithLogitsLoss(), parts[0], l2=0.01, check=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for layer in (model[0], model[2]):
            layer.reset_parameters()
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.3), 6, 20, 0, tmp_path_factory.mktemp("x") / "run")
    return run, task, parts[1]


def test_what_is_affordable_is_replayed(digits):
    chosen = lo.choose(*digits, budget=math.inf)
    assert chosen.exact
    assert chosen.scores.all_exact
    assert chosen.check is None
    assert "exactly: nothing is estimated" in str(chosen)
    torch.testing.assert_close(chosen.scores.values, lo.Replay().score(*digits).values)


def test_otherwise_the_best_on_a_sample_is_chosen(digits, monkeypatch):
    only_estimated(monkeypatch, 128)
    chosen = lo.choose(*digits)
    truth = lo.Replay().score(*digits).mean()
    own = {scores.method: scores for scores in lo.score(list(module.METHODS), *digits)}
    assert not chosen.exact
    assert set(chosen.table.index) == set(own)  # tanh has no kinks
    best = chosen.table[chosen.table["chosen"]].index[0]
    assert chosen.table["tau"].idxmax() == best
    assert chosen.scores.method == f"{best} + Replay"
    taus = {name: lo.metrics.kendall(scores.mean(), truth) for name, scores in own.items()}
    assert taus[best] >= max(taus.values()) - 0.02, taus
    assert max(taus.values()) - min(taus.values()) > 0.1, "methods that all rank alike test nothing"
    exact = chosen.scores.exact
    assert int(exact.sum()) == 128
    torch.testing.assert_close(chosen.scores.mean()[exact], truth[exact])
    torch.testing.assert_close(chosen.scores.values[~exact], own[best].values[~exact])
    table = chosen.check.table
    rows = [int(i) for i in table.index]
    assert sorted(rows) == exact.nonzero().flatten().tolist()
    assert int(chosen.table.loc[best, "compared"]) == len(rows) == 128
    assert table["score"].tolist() == own[best].mean()[rows].tolist()
    chosen.check.check_same_scores(chosen.scores)
    for name, row in chosen.table.iterrows():
        assert row["tau"] == pytest.approx(lo.metrics.kendall(own[name].mean()[rows], truth[rows]))
    part = table[table["sample"] == "extreme"]
    assert chosen.check.extreme.kendall.value <= lo.metrics.kendall(part["score"], part["truth"])
    assert best in str(chosen)
    with pytest.raises(lo.InputError):
        chosen.check.check_same_scores(replace(chosen.scores, values=chosen.scores.values + 1))


def _processor_time(work):
    began = time.process_time()
    work()
    return time.process_time() - began


@pytest.fixture(scope="module")
def with_batch_norm(tmp_path_factory):
    """A run on which ``ACC()`` takes a gradient without each example of a batch in turn."""
    torch.manual_seed(0)
    inputs = torch.randn(150, 6).double(), torch.randn(20, 6).double()
    data, query = (torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()) for x in inputs)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
    task = lo.Task(model, nn.CrossEntropyLoss(), data)
    run = lo.train(task, torch.optim.AdamW(model.parameters(), 0.01), 15, 50, 0, tmp_path_factory.mktemp("x") / "run")
    return run, task, query


def test_what_takes_far_too_long_is_left_out_and_said(with_batch_norm, monkeypatch):
    only_estimated(monkeypatch, 32)
    took = {one: _processor_time(lambda one=one: one.score(*with_batch_norm)) for one in (lo.ACC(), lo.SGDIE())}
    assert took[lo.ACC()] > 4 * took[lo.SGDIE()], "nothing to leave out"
    for share, left_out in ((took[lo.ACC()] / 2 / 60, True), (0.9, False)):
        monkeypatch.setattr(module, "ESTIMATES", share)
        chosen = lo.choose(*with_batch_norm, budget=60)
        why = chosen.table["missing"].get("ACC(jump)")
        assert (isinstance(why, str) and why.startswith("left out")) == left_out
        assert ("ACC(jump) was left out, as it would take about" in str(chosen)) == left_out
        assert set(chosen.table.index[chosen.table["tau"].notna()]) >= {"SGD-IE", "TracIn"}
        assert len(chosen.check.table) == int(chosen.scores.exact.sum()) == 32
        assert not chosen.check.omitted


def test_a_method_that_cannot_be_used_costs_no_second_sweep(with_batch_norm, monkeypatch):
    steps = []

    def counted(_, items, _total, what):
        for item in items:
            steps.append(what)
            yield item

    monkeypatch.setattr(lo.Resources, "track", counted)
    only_estimated(monkeypatch, 16)
    chosen = lo.choose(*with_batch_norm, methods=module.METHODS)
    length = len(with_batch_norm[0])
    assert 2 * length <= steps.count("backward") <= 2 * length + 1, "ACC and SGD-IE, TracIn, and where DVEmb refuses"
    assert "ties the examples" in chosen.table.loc["DVEmb(ggn)", "missing"]
    alone = {one.name: one.score(*with_batch_norm) for one in (lo.SGDIE(), lo.TracIn())}
    assert set(chosen.table.index) == {"ACC(jump)", "DVEmb(ggn)", *alone}
    for name, scores in alone.items():
        rows = [int(row) for row in chosen.check.table.index]
        tau = lo.metrics.kendall(scores.mean()[rows], chosen.check.table["truth"])
        assert chosen.table.loc[name, "tau"] == pytest.approx(tau)


def test_a_study_verifies_with_no_more_replays_than_the_choice_had(with_batch_norm, monkeypatch):
    only_estimated(monkeypatch, 32)
    study = lo.Study(*with_batch_norm)
    study.score()
    assert len(study.verify().table) == 32
    assert len(study.verify(replays=40).table) == 40


def test_rows_to_replay_are_the_extremes_of_all_methods_and_others_at_random():
    torch.manual_seed(0)
    scores = torch.randn(3, 50, dtype=torch.float64)
    order = torch.randperm(50).tolist()
    kinds = selection.sample(scores, [], order, 12)
    extreme, random = ([row for row, kind in kinds.items() if kind == one] for one in ("extreme", "random"))
    ranks = np.mean([rankdata(one) for one in scores.numpy()], axis=0)
    assert set(extreme) == set(np.argsort(ranks)[:3]) | set(np.argsort(ranks)[-3:])
    assert random == [row for row in order if row not in extreme][:6]
    for count in range(2, 12):  # any beginning is balanced
        assert abs(list(kinds.values())[:count].count("extreme") - count / 2) <= 0.5
    assert sorted(selection.sample(scores, [], order, 50)) == list(range(50))
    begun = selection.sample(scores, order[:4], order, 12)  # four were replayed before anything was known
    assert list(begun.values())[:8] == ["random"] * 4 + ["extreme"] * 4
    assert list(begun)[:4] == order[:4]
    assert len(begun) == 12
    assert list(begun.values()).count("extreme") == 6


def test_optimism_is_what_choosing_among_equals_brings():
    """Many methods without any merit: the best of them looks as good as the luckiest, and is not."""
    torch.manual_seed(0)
    measured, brought = [], []
    for seed in range(20):
        scores, truth = torch.randn(8, 40, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
        brought.append(max(lo.metrics.kendall(one, truth) for one in scores))  # the true tau is zero
        measured.append(selection.optimism(scores, truth, seed=seed))
    assert np.mean(brought) > 0.1
    assert np.mean(brought) <= np.mean(measured) <= 2 * np.mean(brought)  # cautious, not absurd
    assert selection.optimism(scores[:1], truth) == 0
    clear = torch.stack([truth, -truth])  # nothing could have been chosen but the first
    assert selection.optimism(clear, truth) == 0


@pytest.mark.full
def test_networks_with_kinks_are_also_scored_with_their_curvature(tmp_path, monkeypatch):
    found = lo.data.load("digits-1v7", 140, 30)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 1), nn.Flatten(0))
    task = lo.Task(model, nn.BCEWithLogitsLoss(), found.train, check=False)
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.1), 3, 20, 0, tmp_path / "run")
    only_estimated(monkeypatch, 32)
    chosen = lo.choose(run, task, found.val)
    assert set(chosen.table.index) > {"ACC(free, kinks)", "SGD-IE(kinks)", "SGD-IE"}


def test_a_method_that_cannot_be_used_is_passed_over(digits, monkeypatch):
    only_estimated(monkeypatch, 32)
    broken = lo.ACC(layers="nothing.*")
    chosen = lo.choose(*digits, methods=[broken, lo.TracIn()])
    assert chosen.scores.method == "TracIn + Replay"
    assert "names no trained parameter" in chosen.table.loc[broken.resolved(digits[0]).name, "missing"]
    with pytest.raises(lo.InputError) as error:
        lo.choose(*digits, methods=[broken])
    assert error.value.code == "layers-match-nothing"


def test_what_cannot_be_chosen_from_is_refused(digits):
    for budget in (-1, 0, "a minute"):
        with refused(lo.InputError, "budget-not-seconds", "give more than 0"):
            lo.choose(*digits, budget=budget)
    with refused(lo.InputError, "budget-too-small", "so give budget="):
        lo.choose(*digits, budget=1e-6)
    with pytest.raises(lo.InputError) as error:
        lo.choose(*digits, methods=[lo.AdamIE()])
    assert error.value.code == "unit-not-comparable"


def test_a_run_whose_scores_grew_does_not_drown_the_others():
    """Five runs of one truth plus noise, one of them forty times as large: scaled alike, they rank like the truth."""
    order = torch.Generator().manual_seed(0)
    truth = torch.randn(60, 2, dtype=torch.float64, generator=order)
    parts = [truth + torch.randn(60, 2, dtype=torch.float64, generator=order) for _ in range(5)]
    parts[3] *= 40
    runs = [lo.Scores(part, tuple(range(60)), (0, 1), "SGD-IE", run_fingerprint=i) for i, part in enumerate(parts)]
    mean = lo.average(runs)
    for column in range(2):
        plain = lo.metrics.spearman(sum(parts)[:, column], truth[:, column])
        assert lo.metrics.spearman(mean.values[:, column], truth[:, column]) > plain + 0.1
    sizes = torch.stack([part.std(0) for part in parts])
    middle = sizes.median(0).values
    torch.testing.assert_close(mean.values, sum(p / s * middle for p, s in zip(parts, sizes, strict=True)) / 5)
    assert mean.unit == runs[0].unit
    assert mean.sign == runs[0].sign
    grown = [replace(one, values=one.values * 1e3) for one in runs]  # all alike: the size is kept
    torch.testing.assert_close(lo.average(grown).values, mean.values * 1e3)
    replays = [replace(one, exact=torch.ones(60, dtype=torch.bool)) for one in runs]
    torch.testing.assert_close(lo.average(replays).values, sum(parts) / 5)  # what happened is not scaled
    half = torch.arange(60) < 30
    mixed = lo.average([replace(one, exact=half) for one in runs])
    torch.testing.assert_close(mixed.values[half], sum(parts)[half] / 5)
    assert mixed.exact.equal(half)
    flat = [replace(one, values=torch.zeros(60, 2, dtype=torch.float64)) for one in runs[:2]]
    assert not lo.average([*flat, runs[0]]).values.isnan().any()


def test_an_average_has_the_mean_and_the_spread(tmp_path):
    values = torch.randn(3, 5, 2, dtype=torch.float64)
    runs = [lo.Scores(part, tuple(range(5)), (0, 1), "SGD-IE", run_fingerprint=i) for i, part in enumerate(values)]
    mean = lo.average(runs)
    torch.testing.assert_close(mean.values, sum(values) / 3)
    torch.testing.assert_close(mean.spread, ((values - mean.values).square().sum(0) / 2).sqrt())
    assert (mean.method, mean.run_fingerprint) == ("SGD-IE, mean of 3 runs", None)
    again = lo.Scores.load(mean.save(tmp_path / "mean.safetensors"))
    torch.testing.assert_close(again.spread, mean.spread)
    for other in (replace(runs[1], method="ACC"), replace(runs[1], train_ids=(5, 6, 7, 8, 9))):
        with pytest.raises(lo.InputError) as error:
            lo.average([runs[0], other])
        assert error.value.code == "scores-not-alike"
    with pytest.raises(lo.InputError):
        lo.average(runs[:1])


def test_one_candidate_that_breaks_does_not_stop_the_choice(with_batch_norm, monkeypatch):
    def broken(*_args, **_options):
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(lo.TracIn, "answer", broken)
    only_estimated(monkeypatch, 32)
    chosen = lo.choose(*with_batch_norm, methods=[lo.TracIn(), lo.SGDIE()])
    assert chosen.scores.method == "SGD-IE + Replay"
    assert "out of luck" in chosen.table.loc["TracIn", "missing"]
    assert "and more" not in chosen.table.loc["TracIn", "missing"]
    with pytest.raises(RuntimeError, match="out of luck"):
        lo.choose(*with_batch_norm, methods=[lo.TracIn()])
