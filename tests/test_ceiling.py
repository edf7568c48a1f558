"""The ceiling of the truth: what a check says of runs whose effects repeat themselves, and of one whose do not."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.cli.verify import _advice
from leaveout.evaluate import ceiling as module
from leaveout.evaluate.ceiling import Ceiling
from leaveout.evaluate.labels import influence_weight
from leaveout.evaluate.metrics import Interval
from leaveout.evaluate.verdict import Verdict
from leaveout.reporting.trust import trusted


def trained(path, activation: type[nn.Module], lr: float, epochs: int = 6):
    torch.manual_seed(0)
    x = torch.randn(100, 6).double()
    y = (x[:, 0] * x[:, 1] + 0.5 * x[:, 2] > 0).long()
    model = nn.Sequential(nn.Linear(6, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, 2)).double()
    task = lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(x[:48], y[:48]), check=False)
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=lr), epochs, 8, 0, path)
    return run, task, TensorDataset(x[80:], y[80:])


@pytest.fixture(scope="module")
def smooth(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("smooth") / "run", nn.Tanh, 0.05)


@pytest.fixture(scope="module")
def rough(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("rough") / "run", nn.ReLU, 3.0)


def test_the_ceiling_is_the_mean_tau_between_replays_from_each_start(smooth):
    scores = lo.SGDIE().score(*smooth)
    check = lo.verify(scores, *smooth, replays=24, moves=2, jitter=0.3, seed=3)
    rows = [int(i) for i in check.table.index]
    truths = [lo.Replay().score(*smooth, ids=rows).mean().numpy()]
    truths += [lo.Replay(move=move, jitter=0.3).score(*smooth, ids=rows).mean().numpy() for move in (4, 5)]
    for name, truth in zip(("truth", "move 1", "move 2"), truths, strict=True):
        np.testing.assert_allclose(check.table[name], truth, atol=1e-12)
    for sample in ("extreme", "random"):
        own = (check.table["sample"] == sample).to_numpy()
        pairs = [(0, 1), (0, 2), (1, 2)]
        taus = [stats.kendalltau(truths[i][own], truths[j][own]).statistic for i, j in pairs]
        measured = getattr(check.ceiling, sample)
        assert measured.value == pytest.approx(np.mean(taus), abs=1e-12)
        assert measured.low < measured.value < measured.high
        mean = np.mean(truths, axis=0)[own]
        expected = stats.kendalltau(check.table["score"][own], mean).statistic
        assert check.ceiling.agreement[sample] == pytest.approx(expected, abs=1e-12)
    assert check.reproducible
    assert check.ceiling.size == 1
    assert check.ceiling.groups == {}


def test_scores_that_are_right_cost_no_moves_unless_asked_for(smooth):
    scores = lo.SGDIE().score(*smooth)
    check = lo.verify(scores, *smooth, replays=24)
    assert (check.ceiling, check.reproducible, check.diagnosis) == (None, None, "")
    asked = lo.verify(scores, *smooth, replays=24, moves=1)
    assert "there is a truth, and the scores follow it" in str(asked)
    assert asked.cost.gradients == pytest.approx(2 * check.cost.gradients, rel=0.05)


def test_wrong_scores_of_a_run_with_a_truth_are_called_wrong(smooth):
    scores = lo.SGDIE().score(*smooth)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    check = lo.verify(replace(scores, values=scores.values[order]), *smooth, replays=24)
    assert check.ceiling.moves == 2
    assert check.reproducible
    assert "so the scores are wrong" in str(check)
    assert "no reproducible effect" not in str(check)
    assert trusted(scores, check).headline == "The scores are wrong"
    assert trusted(scores, replace(check, ceiling=None)).headline == "The ranking cannot be trusted"


def test_a_wide_interval_is_not_called_wrong_scores():
    part = Interval(0.95, 0.7, 1.0)
    close, far = (Ceiling(2, 1e-3, part, part, {"extreme": 0.86, "random": tau}, {}, True) for tau in (0.57, 0.2))
    assert (close.undecided, far.undecided) == (True, False)
    assert "too few to tell" in close.diagnosis(False)
    assert "the scores are wrong" in far.diagnosis(False)


def test_a_run_without_a_truth_is_not_blamed_on_the_scores(rough):
    scores = lo.SGDIE().score(*rough)
    check = lo.verify(scores, *rough, replays=24, jitter=1e-2)
    assert check.reproducible is False
    assert "have no reproducible effect in this run" in str(check)
    assert "the scores are wrong" not in str(check)
    assert "train with smooth activations" in str(check)
    assert trusted(scores, check).headline == "Single examples have no reproducible effect"
    assert _advice([(check, scores)])[1] == "labels"
    sure = replace(check.ceiling, extreme=Interval(0.9, 0.8, 1.0))
    assert _advice([(replace(check, ceiling=sure), scores)])[1] == "refine"
    assert trusted(scores, replace(check, ceiling=sure)).headline == "Only the largest effects are reproducible"
    assert next(iter(check.ceiling.groups)) == 4
    assert check.ceiling.groups[4] == pytest.approx(_tau_of_groups(rough, 4))
    quick = lo.verify(scores, *rough, replays=24, jitter=1e-2, groups=False)
    assert quick.ceiling == replace(check.ceiling, groups={})
    assert "Look at groups or labels" in str(quick)
    assert lo.verify(scores, *rough, replays=24, moves=0).ceiling is None


def test_exact_scores_of_a_run_with_a_truth_are_reproducible(smooth):
    scores = lo.Replay().score(*smooth)
    check = lo.verify(scores, *smooth, replays=24, jitter=0.3, seed=3)
    again = lo.verify(lo.SGDIE().score(*smooth), *smooth, replays=24, moves=2, jitter=0.3, seed=3)
    rows = check.table.index.intersection(again.table.index)
    columns = ["truth", "move 1", "move 2"]
    np.testing.assert_allclose(check.table.loc[rows, columns], again.table.loc[rows, columns], atol=1e-12)
    assert (check.table["score"] == check.table["truth"]).all()
    assert (check.exact, check.verdict, check.reproducible) == (True, Verdict.GOOD, True)
    moves = [lo.Replay(move=move, jitter=0.3).score(*smooth, ids=list(check.table.index)) for move in (4, 5)]
    alone = sum(move.cost.gradients for move in moves)
    assert check.cost.gradients == pytest.approx(alone, rel=0.05), "the scores are not replayed again"
    assert "every score is an exact replay" in str(check)
    assert "a property of the training" in str(check)
    assert trusted(scores, check).headline == "Every score is exact, and reproducible"
    assert trusted(scores, None).headline == "Exact for this run; whether it repeats is not known"
    assert trusted(scores, None).level == "unchecked"
    assert influence_weight(check, 0.0) == min(check.ceiling.extreme.low, check.ceiling.random.low) < 1


def test_exact_scores_of_a_run_without_a_truth_are_called_what_they_are(rough, tmp_path):
    scores = lo.Replay().score(*rough)
    check = lo.verify(scores, *rough, replays=24, jitter=1e-2)
    assert check.reproducible is False
    assert "exact scores answer for its last digits alone" in str(check)
    assert "the scores are wrong" not in str(check)
    assert trusted(scores, check).headline == "Single examples have no reproducible effect"
    assert trusted(scores, check).level == "none"
    assert _advice([(check, scores)])[1] == "labels"
    assert influence_weight(check, 0.0) == 0
    part = replace(check, ceiling=replace(check.ceiling, extreme=Interval(0.9, 0.8, 1.0)))
    assert "rely on the extremes" in str(part)
    assert trusted(scores, part).headline == "Exact, but only the largest effects are reproducible"
    assert _advice([(part, scores)])[1] == "report"
    assert lo.Check.load(check.save(tmp_path / "check.json")) == check
    without = lo.verify(scores, *rough, replays=24, moves=0)
    assert (without.exact, without.ceiling) == (False, None), "replayed again, as asked"
    elsewhere = replace(scores, run_fingerprint=None)
    assert not lo.verify(elsewhere, *rough, replays=24).exact, "exact for a run that may be another"


def _tau_of_groups(problem, size: int) -> float:
    order = torch.Generator().manual_seed(0)
    groups = [torch.randperm(48, generator=order)[:size].tolist() for _ in range(24)]
    here = lo.Replay().score(*problem, groups=groups).mean()
    there = lo.Replay(move=1, jitter=1e-2).score(*problem, groups=groups).mean()
    return stats.kendalltau(here, there).statistic


def test_a_check_with_its_ceiling_is_kept_on_disk(rough, tmp_path):
    check = lo.verify(lo.SGDIE().score(*rough), *rough, replays=16, moves=1, jitter=1e-2)
    again = lo.Check.load(check.save(tmp_path / "check.json"))
    assert (again.ceiling, again.sentence) == (check.ceiling, check.sentence)
    pd.testing.assert_frame_equal(again.table, check.table, check_exact=True)


def told(extreme: float, random: float, groups: dict[int, float], single: bool = True) -> Ceiling:
    wide = [Interval(tau, tau - 0.1, tau + 0.1) for tau in (extreme, random)]
    return Ceiling(2, 1e-3, *wide, {"extreme": 0.3, "random": 0.2}, groups, single, ("larger batches",))


def test_the_diagnosis_says_from_what_size_on():
    assert "groups (reproducible from about 16 examples on)" in told(0.1, 0.0, {4: 0.2, 16: 0.6}).diagnosis(False)
    assert "groups (of more than 16 examples)" in told(0.1, 0.0, {4: 0.2, 16: 0.4}).diagnosis(False)
    assert "rely on the extremes" in told(0.9, 0.0, {4: 0.9}).diagnosis(False)
    assert "these groups have no reproducible effect" in told(0.1, 0.0, {}, single=False).diagnosis(False)
    assert told(0.1, 0.0, {4: 0.2, 16: 0.6}).size == 16
    assert module.REPRODUCIBLE == 0.5


def test_a_number_of_moves_that_is_not_one_is_refused(smooth):
    scores = lo.SGDIE().score(*smooth)
    with pytest.raises(lo.InputError) as error:
        lo.verify(scores, *smooth, moves=-1)
    assert error.value.code == "moves-not-a-count"
