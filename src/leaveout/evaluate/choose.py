"""The method chosen by measurement: replay everything if that is affordable, otherwise the method that ranks best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import Dataset

from leaveout._util import notebook
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, LeaveoutError, UnsupportedError, check_seed
from leaveout.estimators import ACC, SGDIE, DVEmb, Estimator, Replay, TracIn, score
from leaveout.estimators.question import Question
from leaveout.estimators.replay import replayed
from leaveout.estimators.several import sharing
from leaveout.evaluate.metrics.agreement import compare, kendall
from leaveout.evaluate.plan import replay_seconds, score_seconds
from leaveout.evaluate.selection import optimism, sample
from leaveout.evaluate.verify import Check
from leaveout.run.reader import Run
from leaveout.scores import UNIT, Scores
from leaveout.sweep.kink_size import are_mild
from leaveout.task.task import Task
from leaveout.trajectory.left_out import Groups, leave_out
from leaveout.trajectory.trajectory import Trajectory

FEWEST, MOST = 128, 1024
"""The number of replays that methods are compared with: as many as the budget allows, between these two."""

PATIENCE, LEAST = 300.0, 32
"""Where 128 replays are predicted to take more seconds than this, there are fewer, though no fewer than this number."""

SLOWER = 5
"""A method that takes longer than the budget is left out if it takes more than this many times as long as SGD-IE."""

QUICK = 0.1
"""Seconds per replay below which no method takes so long that its time would have to be predicted."""

SLOW = "left out, as it would take about "
"""How the reason begins why a method is missing that takes too long."""

COLUMNS = ["method", "tau", "compared", "seconds", "chosen", "missing"]

METHODS: tuple[Estimator, ...] = (ACC(), SGDIE(), DVEmb(), TracIn())
"""The methods that are compared; of equals the first is chosen."""

KINKED: tuple[Estimator, ...] = (ACC(kinks=True), SGDIE(kinks=True))
"""These are also compared if the model has kinks that can be given a curvature."""


@dataclass(frozen=True)
class Chosen:
    """Scores by the method that fits a run, and how it was chosen.

    ``scores`` are exact replays (``exact``), or the best method's scores, with exact values in the rows that were
    replayed. ``table`` has a row per method: its Kendall's tau with the replays that methods were compared with, its
    seconds, whether it was chosen, and why it is missing if it cannot be used or takes too long. ``check`` is the trust
    in the chosen method, corrected for its having been chosen on the same replays; None if everything is exact.
    ``predicted`` is how many seconds replaying everything was predicted to take.
    """

    scores: Scores
    table: pd.DataFrame
    check: Check | None
    exact: bool
    predicted: float
    budget: float

    @property
    def sentence(self) -> str:
        """What was chosen, why, and how far it can be trusted, in words."""
        if self.exact:
            return f"Every one of the {len(self.scores.train_ids)} rows was replayed exactly: nothing is estimated."
        best = self.table[self.table["chosen"]].iloc[0]
        others = self.table[~self.table["chosen"] & self.table["tau"].notna()]
        beside = ", ".join(f"{name} {row['tau']:.2f}" for name, row in others.iterrows())
        ranked = f"{best.name} agreed best with {int(best['compared'])} exact replays (tau {best['tau']:.2f}"
        ranked += f"; {beside})." if beside else ")."
        all_of_it = f"Replaying everything would take about {_about(self.predicted)}; the budget is {self.budget:g} s."
        slow = [f"{name} was {why}." for name, why in self.table["missing"].items() if str(why).startswith(SLOW)]
        return " ".join([ranked, all_of_it, *slow, *([str(self.check)] if self.check else [])])

    def __str__(self) -> str:
        return self.sentence

    def __repr__(self) -> str:
        return f"Chosen({self.scores.method})"

    def _repr_html_(self) -> str:
        columns = ["tau", "compared", "seconds", "chosen"]
        rows = [(name, *row) for name, *row in self.table[columns].itertuples()]
        return notebook.card(f"Chosen: {self.scores.method}", [self.sentence], ("method", *columns), rows)

    def to_frame(self) -> pd.DataFrame:
        """Return a copy of the table, with one row per method that was compared."""
        return self.table.copy()


def choose(
    run: Run,
    task: Task,
    query: Dataset,
    *,
    budget: float = 60.0,
    methods: Sequence[Estimator] | None = None,
    queries: str = "mean",
    ids: Sequence[int] | None = None,
    groups: Groups | None = None,
    seed: int = 0,
    resources: Resources | None = None,
) -> Chosen:
    """Score with the method that is measured to be best for this run.

    If replaying every row is predicted to fit the budget, or there are no more than 128 rows, everything is replayed,
    and the scores are exact. Otherwise all ``methods`` score every row, sharing sweeps; one sample of rows is replayed
    once, half of them the most extreme by all methods together and half at random; and the method that agrees best
    with all of these replays is chosen. Its trust is its agreement with them, lowered by a bootstrap estimate of the
    optimism from having been chosen on the same replays. Replayed rows get their exact values.

    What would take far longer than the budget is not done unasked: ``ACC()`` is left out where it needs more than the
    budget and more than five times as long as SGD-IE (a gradient without each example in turn, under BatchNorm), and
    the sample is smaller than 128 rows, but not than 32, where these would take more than five minutes.

    Args:
        run: the recorded run.
        task: what was trained.
        query: the examples whose loss is explained.
        budget: seconds of processor time that replays may take; a sample nevertheless has 128 rows, unless these take
            more than five minutes. Scoring takes additional time.
        methods: the estimators to compare; of equals the first is chosen. Their scores must be changes of the loss. By
            default ACC, SGD-IE, DVEmb and TracIn, and the first two with the curvature of kinks if there are any.
        queries: ``"mean"`` for their mean loss, ``"each"`` for one column per query.
        ids: the examples to score; all of them by default.
        groups: leave these out together instead.
        seed: for the random part of the sample.
        resources: memory budget and progress.
    """
    if not (isinstance(budget, int | float) and budget >= 0):
        raise InputError(f"budget={budget!r} is not a number of seconds: give 0 or more.", code="budget-not-seconds")
    other_units = [method.name for method in methods or () if method.unit != UNIT]
    if other_units:
        raise InputError(
            f"{other_units[0]} is not counted in {UNIT}, which replays are: leave it out.", code="unit-not-comparable"
        )
    check_seed(seed)
    options = {"queries": queries, "ids": ids, "groups": groups, "resources": resources}
    rows = len(leave_out(task.size, ids, groups))
    predicted = replay_seconds(run, task, query, rows, resources) if budget < math.inf else 0.0
    if predicted <= budget or rows <= FEWEST:
        scores = Replay().score(run, task, query, **options)  # type: ignore[arg-type]
        return Chosen(scores, _alone(scores), None, True, predicted, budget)
    too_slow: dict[str, str] = {}
    if methods is None:
        methods = methods_for(run, task)
        if predicted / rows > QUICK:
            methods, too_slow = _affordable(methods, run, task, query, budget, resources)
    scored, missing = _scored(methods, run, task, query, options)
    count = sample_size(predicted / rows, budget)
    estimates = torch.stack([scores.mean().double().cpu() for scores in scored.values()])
    extreme, random = sample(estimates, min(count, rows), seed)
    samples = {"extreme": extreme, "random": random}
    picked = extreme + random
    question = Question(run, task, query, resources=resources or Resources())
    truth = replayed(next(iter(scored.values())), picked, question)
    exact = truth.mean().double().cpu()
    taus = {name: _tau(one[picked], exact) for name, one in zip(scored, estimates, strict=True)}
    best = max(taus, key=lambda name: taus[name])
    winner = scored[best]
    scores = _with_replays(winner, picked, truth)
    check = _trust(winner, scores, samples, exact, optimism(estimates[:, picked], exact, seed=seed), run)
    return Chosen(scores, _table(taus, scored, too_slow | missing, best, len(picked)), check, False, predicted, budget)


def sample_size(seconds: float, budget: float) -> int:
    """Return how many replays methods are compared with, if each takes so many seconds.

    >>> sample_size(0.01, 60), sample_size(0.3, 60), sample_size(0.3, 0), sample_size(10, 60), sample_size(500, 60)
    (1024, 200, 128, 32, 32)
    """
    few = max(LEAST, min(FEWEST, PATIENCE / seconds))
    return int(max(few, min(MOST, budget / seconds)))


def methods_for(run: Run, task: Task) -> tuple[Estimator, ...]:
    """List the methods that are worth comparing on a run."""
    try:
        mild = are_mild(Trajectory(run, task).compared())
    except LeaveoutError:
        mild = False  # no second derivatives: methods that need them report it themselves
    return (*KINKED, *METHODS) if mild else METHODS


def _affordable(
    methods: Sequence[Estimator], run: Run, task: Task, query: Dataset, budget: float, resources: Resources | None
) -> tuple[list[Estimator], dict[str, str]]:
    """Return the methods without ACC if that takes too long, and why it is missing."""
    acc = ACC().resolved(run, task)
    if not isinstance(acc, ACC) or acc.transport != "jump":
        return list(methods), {}
    try:
        pair = (resources or Resources()).track((acc, SGDIE()), 2, "predicting times")
        seconds, shared = (score_seconds(method, run, task, query, resources) for method in pair)
    except UnsupportedError:
        return list(methods), {}
    if seconds <= max(budget, SLOWER * shared):
        return list(methods), {}
    return [one for one in methods if not isinstance(one, ACC)], {acc.name: f"{SLOW}{_about(seconds)}"}


def _about(seconds: float) -> str:
    """Write a duration as a round number.

    >>> _about(61.2), _about(2300), _about(65000)
    ('61 s', '38 minutes', '18 hours')
    """
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _scored(
    methods: Sequence[Estimator], run: Run, task: Task, query: Dataset, options: dict
) -> tuple[dict[str, Scores], dict[str, str]]:
    """Return the scores of every method that can be used, by name, and why the others cannot."""
    scored: dict[Estimator, Scores] = {}
    missing: dict[str, str] = {}
    first: LeaveoutError | None = None
    waiting = sharing(methods, run, task)
    while waiting:
        unit = waiting.pop(0)
        try:
            scored |= zip(unit, score(unit, run, task, query, **options), strict=True)
        except LeaveoutError as error:
            if len(unit) > 1:  # which of them cannot be used?
                waiting = [[method] for method in unit] + waiting
                continue
            first = first or error
            missing[unit[0].resolved(run, task).name] = f"cannot be used: {error}"
    if not scored and first is not None:
        raise first
    return {scored[method].method: scored[method] for method in methods if method in scored}, missing


def _with_replays(scores: Scores, rows: list[int], truth: Scores) -> Scores:
    """Return the scores with exact values in the rows that were replayed."""
    values = scores.values.clone()
    values[rows] = truth.values.to(values)
    exact = torch.zeros(len(values), dtype=torch.bool)
    exact[rows] = True
    cost = scores.cost + truth.cost
    return replace(scores, values=values, method=f"{scores.method} + Replay", exact=exact, cost=cost)


def _tau(estimate: Tensor, exact: Tensor) -> float:
    tau = kendall(estimate, exact)
    return -1.0 if math.isnan(tau) else tau


def _trust(
    winner: Scores, scores: Scores, samples: dict[str, list[int]], exact: Tensor, too_high: float, run: Run
) -> Check:
    """Return the check of the winner from all replays, with rank correlations lowered by the optimism of the choice."""
    rows = [row for part in samples.values() for row in part]
    table = pd.DataFrame(
        {
            "score": winner.mean()[rows].double().cpu().numpy(),
            "truth": exact.numpy(),
            "sample": [name for name, part in samples.items() for _ in part],
        },
        index=pd.Index([winner.train_ids[row] for row in rows], name="train"),
    )
    parts = {str(name): part for name, part in table.groupby("sample")}
    agreement = {name: compare(part["score"], part["truth"]).lowered(too_high) for name, part in parts.items()}
    spread = {name: float(part["truth"].std()) for name, part in parts.items()}
    by_sample = (agreement["extreme"], agreement["random"], spread)
    return Check(*by_sample, table, scores.method, scores.cost, run.fingerprint, queries=len(scores.query_ids))


def _table(
    taus: dict[str, float], scored: dict[str, Scores], missing: dict[str, str], best: str, compared: int
) -> pd.DataFrame:
    rows = [
        {"method": name, "tau": tau, "compared": compared, "seconds": scored[name].cost.seconds, "chosen": name == best}
        for name, tau in sorted(taus.items(), key=lambda item: -item[1])
    ]
    rows += [{"method": name, "tau": math.nan, "chosen": False, "missing": why} for name, why in missing.items()]
    return pd.DataFrame(rows, columns=COLUMNS).set_index("method")


def _alone(scores: Scores) -> pd.DataFrame:
    row = {"method": scores.method, "tau": 1.0, "compared": 0, "seconds": scores.cost.seconds, "chosen": True}
    return pd.DataFrame([row], columns=COLUMNS).set_index("method")
