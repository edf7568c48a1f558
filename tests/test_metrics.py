"""Metrics against slow independent definitions, their symmetries, and the bootstrap against a plain loop."""

import math
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from leaveout.errors import InputError
from leaveout.evaluate.metrics import agreement as m
from refusal import refused

JACCARD = partial(m.jaccard, percent=30)
MAGNITUDE = partial(m.jaccard_magnitude, percent=30)
METRICS = [m.rmse, m.kendall, m.spearman, JACCARD, MAGNITUDE]
RANKED = [m.kendall, m.spearman, JACCARD]

# Few distinct values, so that ties are common; -20 .. 20 so that the monotone map below keeps distinct values distinct.
PAIRS = st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), min_size=2, max_size=30).map(
    lambda pairs: tuple(np.array(column, dtype=float) for column in zip(*pairs, strict=True))
)
PERCENT = st.integers(1, 100)


def same(a, b):
    return a == pytest.approx(b, abs=1e-12, nan_ok=True)


def noisy(n, seed=0, ties=False):
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=n)
    estimate = truth + rng.normal(size=n)
    return (np.round(estimate), np.round(truth)) if ties else (estimate, truth)


def slow_tau(x, y):
    agree = untied_x = untied_y = 0
    for i in range(len(x)):
        for j in range(i):
            a, b = np.sign(x[i] - x[j]), np.sign(y[i] - y[j])
            agree, untied_x, untied_y = agree + a * b, untied_x + a * a, untied_y + b * b
    return agree / math.sqrt(untied_x * untied_y) if untied_x * untied_y else math.nan


def slow_jaccard(x, y, percent):
    def influential(values):
        order = sorted(range(len(values)), key=lambda i: (values[i], i))
        k = max(1, round(len(values) * percent / 200))
        return set(order[:k]) | set(order[-k:])

    a, b = influential(x), influential(y)
    return len(a & b) / len(a | b)


def slow_magnitude(x, y, percent):
    def influential(values):
        order = sorted(range(len(values)), key=lambda i: (abs(values[i]), i))
        return set(order[-max(1, round(len(values) * percent / 100)) :])

    a, b = influential(x), influential(y)
    return len(a & b) / len(a | b)


@settings(deadline=None)
@given(PAIRS, PERCENT)
def test_slow_definitions(pair, percent):
    x, y = pair
    assert same(m.rmse(x, y), math.sqrt(sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / len(x)))
    assert same(m.kendall(x, y), slow_tau(x, y))
    constant = len(set(x)) == 1 or len(set(y)) == 1
    assert same(m.spearman(x, y), math.nan if constant else stats.spearmanr(x, y).statistic)
    assert same(m.jaccard(x, y, percent), slow_jaccard(x, y, percent))
    assert same(m.jaccard_magnitude(x, y, percent), slow_magnitude(x, y, percent))


@settings(deadline=None)
@given(PAIRS)
def test_symmetry_and_range(pair):
    x, y = pair
    for metric in METRICS:
        assert same(metric(x, y), metric(y, x))
    for metric in (m.kendall, m.spearman):
        assert math.isnan(metric(x, y)) or abs(metric(x, y)) <= 1 + 1e-12
        assert same(metric(x, -y), -metric(x, y))
    for metric in (JACCARD, MAGNITUDE):
        assert 0 <= metric(x, y) <= 1
        assert metric(x, x) == 1
    assert m.rmse(x, y) >= 0
    assert m.rmse(x, x) == 0


@settings(deadline=None)
@given(PAIRS)
def test_only_the_order_matters(pair):
    x, y = pair
    for metric in RANKED:
        assert same(metric(np.exp(x / 10) - 3, y**3), metric(x, y))


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20, unique=True))
def test_reversed_order(values):
    x = np.array(values)
    assert same(m.kendall(x, -x), -1)
    assert same(m.spearman(x, -x), -1)
    assert m.jaccard_magnitude(x, -x, 30) == 1


@pytest.mark.parametrize("metric", METRICS)
def test_every_kind_of_sequence(metric):
    x, y = noisy(12)
    expected = metric(x, y)
    assert type(expected) is float
    for kind in (list, tuple, pd.Series, torch.tensor, lambda v: torch.tensor(v, requires_grad=True)):
        assert metric(kind(x), kind(y)) == expected
    assert math.isfinite(metric(torch.tensor(x, dtype=torch.bfloat16), y.astype(np.float32)))


def test_constant_scores_have_no_order():
    flat, y = np.zeros(8), np.arange(8.0)
    for metric in (m.kendall, m.spearman):
        assert math.isnan(metric(flat, y))
        interval = m.bootstrap(metric, flat, y, resamples=20)
        assert all(map(math.isnan, (interval.value, interval.low, interval.high)))
    agreement = m.compare(flat, y, resamples=20)
    assert agreement.rmse.value == pytest.approx(math.sqrt(140 / 8))
    assert str(agreement.kendall) == "nan (nan to nan)"


@pytest.mark.parametrize(
    ("estimate", "truth", "code", "says"),
    [
        ([1.0, 2.0], [1.0, 2.0, 3.0], "lengths-differ", "estimate has 2 examples and truth 3"),
        ([1.0], [1.0], "too-few-to-compare", "at least 2"),
        ([], [], "too-few-to-compare", "at least 2"),
        ([1.0, math.nan], [1.0, 2.0], "values-not-finite", "estimate has 1 NaN"),
        ([1.0, 2.0], [math.inf, math.nan], "values-not-finite", "truth has 2 NaN or infinite"),
        (np.ones((2, 2)), [1.0, 2.0], "not-one-score-per-example", "estimate has shape (2, 2)"),
        (["a", "b"], [1.0, 2.0], "not-one-score-per-example", "not a sequence of numbers"),
    ],
)
def test_bad_input_is_refused(estimate, truth, code, says):
    for call in (*METRICS, partial(m.bootstrap, m.rmse), m.compare):
        with refused(InputError, code, says):
            call(estimate, truth)


def test_bad_options_are_refused():
    x, y = noisy(8)
    for percent in (0, -5, 101, math.nan):
        for metric in (m.jaccard, m.jaccard_magnitude):
            with refused(InputError, "percent-out-of-range", "percent"):
                metric(x, y, percent)
    with refused(InputError, "resamples-not-a-count", "resamples"):
        m.bootstrap(m.rmse, x, y, resamples=0)
    for level in (0.0, 1.0, 95.0):
        with refused(InputError, "level-out-of-range", "level"):
            m.bootstrap(m.rmse, x, y, level=level)


SLOW = {
    "rmse": (m.rmse, lambda x, y: float(np.sqrt(np.mean((x - y) ** 2)))),
    "kendall": (m.kendall, lambda x, y: float(stats.kendalltau(x, y).statistic)),
    "spearman": (m.spearman, lambda x, y: float(stats.spearmanr(x, y).statistic)),
    "jaccard": (JACCARD, partial(slow_jaccard, percent=30)),
    "magnitude": (MAGNITUDE, partial(slow_magnitude, percent=30)),
}


@pytest.mark.filterwarnings("ignore:An input array is constant")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [2, 3, 17, 64])
@pytest.mark.parametrize("name", SLOW)
def test_fast_resamples_equal_the_loop(name, n, ties):
    fast, slow = SLOW[name]
    x, y = noisy(n, ties=ties)
    (index,) = m._resamples(n, 50, seed=3)
    np.testing.assert_allclose(m._rows(fast)(x, y, index), [slow(x[i], y[i]) for i in index], rtol=0, atol=1e-12)
    # A function this module does not know is called once per resample, on the same resamples.
    one, two = (m.bootstrap(metric, x, y, resamples=50, seed=3) for metric in (fast, slow))
    assert [same(a, b) for a, b in zip(vars(one).values(), vars(two).values(), strict=True)] == [True] * 4


@pytest.mark.parametrize("metric", METRICS)
def test_neither_size_limit_changes_an_interval(metric, monkeypatch):
    x, y = noisy(32, ties=True)
    whole = m.bootstrap(metric, x, y, resamples=40)
    monkeypatch.setattr(m, "_DENSE", 8)  # τ by a loop
    loop = m.bootstrap(metric, x, y, resamples=40)
    assert (loop.low, loop.high) == pytest.approx((whole.low, whole.high))
    monkeypatch.setattr(m, "_CHUNK", 32 * 7)  # 40 resamples in blocks of 7, the last one smaller
    chunked = m.bootstrap(metric, x, y, resamples=40)
    assert (chunked.low, chunked.high) == pytest.approx((whole.low, whole.high))


def test_kendall_is_exact_where_counts_are_large():
    x, y = noisy(m._DENSE, ties=True)
    (index,) = m._resamples(len(x), 3, seed=0)
    expected = [stats.kendalltau(x[i], y[i]).statistic for i in index]
    np.testing.assert_allclose(m._kendall_rows(x, y, index), expected, rtol=1e-13)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_interval_covers_the_value(seed):
    x, y = noisy(50, seed)
    for metric in (m.rmse, m.kendall, m.spearman):
        interval = m.bootstrap(metric, x, y, resamples=200, level=0.99, seed=seed)
        assert interval.low <= interval.value <= interval.high
        wide, narrow = (m.bootstrap(metric, x, y, resamples=200, level=level) for level in (0.95, 0.5))
        assert wide.low <= narrow.low <= narrow.high <= wide.high


def test_coverage_of_kendall_for_normal_scores():
    """τ of a normal pair with correlation r is 2/π · asin(r); a 90% interval should hold it about 90% of the time."""
    r, n, trials = 0.6, 60, 300
    truth = 2 / math.pi * math.asin(r)
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(trials):
        x, y = rng.multivariate_normal([0, 0], [[1, r], [r, 1]], size=n).T
        interval = m.bootstrap(m.kendall, x, y, resamples=200, level=0.9, seed=trial)
        held += interval.low <= truth <= interval.high
    assert 0.84 <= held / trials <= 0.95


@pytest.mark.parametrize("n", [5, 8])
def test_a_perfect_sample_of_few_is_not_certain(n):
    """How often a sample without a discordant pair comes from scores whose τ lies below the interval: 2.5%."""
    least = m.compare(range(n), range(n)).of_a_sample().kendall.low
    order, rho = np.random.default_rng(0), np.sin(np.pi / 2 * least)  # τ of normal scores
    x, noise = order.normal(size=(2, 40_000, n))
    y = rho * x + np.sqrt(1 - rho**2) * noise
    perfect = (x.argsort(1) == y.argsort(1)).all(1).mean()
    assert 0.01 < perfect < 0.04
    nearly = m.compare(range(n), [*range(n - 2), n - 1, n - 2])
    assert nearly.of_a_sample() == nearly


def test_seed_decides():
    x, y = noisy(30)
    assert m.bootstrap(m.kendall, x, y, seed=1) == m.bootstrap(m.kendall, x, y, seed=1)
    assert m.bootstrap(m.kendall, x, y, seed=1) != m.bootstrap(m.kendall, x, y, seed=2)


def test_compare(monkeypatch):
    x, y = noisy(64)
    monkeypatch.setattr(m, "_loop_rows", None)  # nothing is computed resample by resample
    agreement = m.compare(x, torch.tensor(y), seed=5)
    assert agreement.count == 64
    assert agreement.kendall == m.bootstrap(m.kendall, x, y, seed=5)
    assert agreement.jaccard[30] == m.bootstrap(JACCARD, x, y, seed=5)
    frame = agreement.to_frame()
    assert list(frame.index) == ["rmse", "kendall", "spearman", *(f"jaccard@{p}" for p in (70, 50, 30, 10))]
    assert list(frame.columns) == ["value", "low", "high", "level", "count"]
    assert frame.loc["spearman", "low"] == agreement.spearman.low
    assert list(m.compare(x, y, percents=[2.5], resamples=10).to_frame().index)[-1] == "jaccard@2.5"


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (m.Interval(0.93, 0.85, 0.97), "0.93 (0.85 to 0.97)"),
        (m.Interval(0.01, -0.2, 0.2), "0.01 (-0.20 to 0.20)"),
        (m.Interval(2e-5, 1e-5, 3.14e-5), "2e-05 (1e-05 to 3.1e-05)"),
    ],
)
def test_interval_reads_well(interval, text):
    assert str(interval) == text
