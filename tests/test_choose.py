"""The method chosen by measurement, and averages over runs."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import leaveout as lo
from leaveout.evaluate import choose as module


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


def test_otherwise_the_best_is_chosen_on_one_half_and_trusted_by_the_other(digits):
    chosen = lo.choose(*digits, budget=0)
    truth = lo.Replay().score(*digits).mean()
    own = {scores.method: scores for scores in lo.score(list(module.METHODS), *digits)}
    assert not chosen.exact
    assert set(chosen.table.index) == set(own)
    best = chosen.table[chosen.table["chosen"]].index[0]
    assert chosen.table["tau"].idxmax() == best
    assert chosen.scores.method == f"{best} + Replay"
    taus = {name: lo.metrics.kendall(scores.mean(), truth) for name, scores in own.items()}
    assert taus[best] >= max(taus.values()) - 0.02, taus
    assert max(taus.values()) - min(taus.values()) > 0.1, "methods that all rank alike test nothing"
    exact = chosen.scores.exact
    assert int(exact.sum()) == module.FEWEST
    torch.testing.assert_close(chosen.scores.mean()[exact], truth[exact])
    torch.testing.assert_close(chosen.scores.values[~exact], own[best].values[~exact])
    trusted = [int(i) for i in chosen.check.table.index]
    assert len(trusted) == module.FEWEST // 2 == int(chosen.table.loc[best, "compared"])
    assert set(trusted) <= set(exact.nonzero().flatten().tolist())
    assert chosen.check.table["score"].tolist() == own[best].mean()[trusted].tolist()
    chosen.check.check_same_scores(chosen.scores)
    compared = sorted(set(exact.nonzero().flatten().tolist()) - set(trusted))
    for name, row in chosen.table.iterrows():
        assert row["tau"] == pytest.approx(lo.metrics.kendall(own[name].mean()[compared], truth[compared]))
    assert best in str(chosen)
    with pytest.raises(lo.InputError):
        chosen.check.check_same_scores(replace(chosen.scores, values=chosen.scores.values + 1))


def test_a_method_that_cannot_be_used_is_passed_over(digits):
    broken = lo.ACC(layers="nothing.*")
    chosen = lo.choose(*digits, budget=0, methods=[broken, lo.TracIn()])
    assert chosen.scores.method == "TracIn + Replay"
    assert "names no trained parameter" in chosen.table.loc[broken.resolved(digits[0]).name, "missing"]
    with pytest.raises(lo.InputError) as error:
        lo.choose(*digits, budget=0, methods=[broken])
    assert error.value.code == "layers-match-nothing"


def test_what_cannot_be_chosen_from_is_refused(digits):
    with pytest.raises(lo.InputError) as error:
        lo.choose(*digits, budget=-1)
    assert error.value.code == "budget-not-seconds"
    with pytest.raises(lo.InputError) as error:
        lo.choose(*digits, methods=[lo.AdamIE()])
    assert error.value.code == "unit-not-comparable"


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
