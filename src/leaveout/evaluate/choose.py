"""The method chosen by measurement: replay everything if that is affordable, otherwise the method that ranks best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import Dataset

from leaveout._util import notebook
from leaveout.compute.clock import Clock, OutOfTimeError, check_budget, practical
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, LeaveoutError, check_seed, first_line
from leaveout.estimators import ACC, SGDIE, DVEmb, Estimator, Replay, TracIn
from leaveout.estimators.question import Question
from leaveout.estimators.several import one_by_one, sharing
from leaveout.evaluate.check import MINIMUM, Check, agreement_of
from leaveout.evaluate.metrics.agreement import kendall
from leaveout.evaluate.replays import FIRST, Replays, shortened
from leaveout.evaluate.selection import optimism, sample
from leaveout.run.reader import Run
from leaveout.scores import UNIT, Scores
from leaveout.sweep.kink_size import are_mild
from leaveout.task.task import Task
from leaveout.trajectory.left_out import Groups, LeftOut, leave_out
from leaveout.trajectory.trajectory import Trajectory

ENOUGH, MOST = 128, 1024
"""Replays that methods are compared with: if fewer than the first fit, that is said; there are at most the second."""

PROBE, ALL, ESTIMATES = 0.2, 0.8, 0.5
"""Shares of the time: for finding out whether all rows can be replayed, for doing so, and for estimating instead."""

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
    in the chosen method, corrected for its having been chosen on the same replays; None if everything is exact, or
    nothing was replayed. ``predicted`` is how many seconds replaying everything would take, as far as that was
    measured, and ``omitted`` what did not fit the budget, and which budget would do.
    """

    scores: Scores
    table: pd.DataFrame
    check: Check | None
    exact: bool
    predicted: float
    budget: float
    omitted: str = ""

    @property
    def sentence(self) -> str:
        """What was chosen, why, and how far it can be trusted, in words."""
        if self.exact:
            return f"Every one of the {len(self.scores.train_ids)} rows was replayed exactly: nothing is estimated."
        best = self.table[self.table["chosen"]].iloc[0]
        others = self.table[~self.table["chosen"] & self.table["tau"].notna()]
        beside = ", ".join(f"{name} {row['tau']:.2f}" for name, row in others.iterrows())
        ranked = f"{best.name} was taken without a comparison."
        if self.check is not None and not math.isnan(best["tau"]):
            ranked = f"{best.name} agreed best with {int(best['compared'])} exact replays (tau {best['tau']:.2f}"
            ranked += f"; {beside})." if beside else ")."
        if self.predicted:
            ranked += f" Replaying everything would take about {_about(self.predicted)}."
        slow = [f"{name} was {why}." for name, why in self.table["missing"].items() if str(why).startswith(SLOW)]
        found = "" if self.check is None else self.check.sentence
        return " ".join(part for part in (ranked, *slow, found, self.omitted) if part)

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

    A few rows are replayed first. If that shows that all of them fit into the budget, everything is replayed, and the
    scores are exact. Otherwise ``methods`` score every row, sharing sweeps, and replays follow for as long as there is
    time: the most extreme rows by all methods together and random ones in turns. The method that agrees best with
    these replays is chosen. Its trust is its agreement with them, lowered by a bootstrap estimate of the optimism from
    having been chosen on the same replays. Replayed rows get their exact values.

    All of this stops when the budget is used up. Methods that would take longer than half of it are left out, such as
    ``ACC()`` where it needs a gradient without each example in turn (under BatchNorm). What did not fit is said.

    Args:
        run: the recorded run.
        task: what was trained.
        query: the examples whose loss is explained.
        budget: seconds of processor time, those of all threads together (with an engine, seconds by the wall).
        methods: the estimators to compare; of equals the first is chosen. Their scores must be changes of the loss. By
            default ACC, SGD-IE, DVEmb and TracIn, and the first two with the curvature of kinks if there are any.
        queries: ``"mean"`` for their mean loss, ``"each"`` for one column per query.
        ids: the examples to score; all of them by default.
        groups: leave these out together instead.
        seed: for the random part of the sample.
        resources: memory budget and progress.
    """
    check_budget(budget)
    other_units = [method.name for method in methods or () if method.unit != UNIT]
    if other_units:
        raise InputError(
            f"{other_units[0]} is not counted in {UNIT}, which replays are: leave it out.", code="unit-not-comparable"
        )
    check_seed(seed)
    question = Question(run, task, query, queries, ids, groups, resources=resources or Resources())
    clock, left_out = question.resources.started(budget), leave_out(task.size, ids, groups)
    rows = len(left_out)
    replays = Replays(partial(_truth, question, left_out))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    if _replayed(replays, order, clock):
        return _exact(replays, left_out, clock)
    scored, missing = _scored(methods, question, clock)
    estimates = torch.stack([scores.mean().double().cpu() for scores in scored.values()])
    kinds = sample(estimates, replays.rows, order, min(rows, MOST))
    replays.take([row for row in kinds if row not in replays.rows], clock)
    if len(replays.rows) == rows:
        return _exact(replays, left_out, clock)
    predicted = replays.seconds(rows)
    wanted, omitted = min(ENOUGH, len(kinds)), ""
    if len(replays.rows) < wanted:
        more = replays.seconds(wanted - len(replays.rows))
        omitted = shortened(f"{len(replays.rows)} of {wanted} replays", clock, more)
    picked, taus, check = replays.rows, dict.fromkeys(scored, math.nan), None
    best = next(iter(scored))
    scores = scored[best]
    if picked:
        truth = replays.values
        exact = truth.mean(1).double().cpu()
        if len(picked) >= 2:
            taus = {name: _tau(one[picked], exact) for name, one in zip(scored, estimates, strict=True)}
        if len(picked) >= 2 * MINIMUM:
            best = max(taus, key=lambda name: taus[name])
        winner, scores = scored[best], _with_replays(scored[best], picked, truth, replays.cost)
        too_high = optimism(estimates[:, picked], exact, seed=seed) if len(picked) >= 2 * MINIMUM else 0.0
        check = _trust(winner, scores, {row: kinds[row] for row in picked}, exact, too_high, run)
        check = replace(check, omitted=omitted, budget=float(budget))
        omitted = ""
    table = _table(taus, scored, missing, best, len(picked))
    return Chosen(scores, table, check, False, predicted, budget, omitted)


def _truth(question: Question, left_out: LeftOut, rows: Sequence[int], clock: Clock) -> Scores:
    """Replay some rows of what is left out."""
    names, named = [left_out.names[row] for row in rows], left_out.named()
    ids = None if named else [int(name) for name in names]
    groups = {str(name): named[str(name)] for name in names} if named else None
    return Replay().answer(replace(question, ids=ids, groups=groups, resources=question.resources.within(clock)))


def _replayed(replays: Replays, order: Sequence[int], clock: Clock) -> bool:
    """Replay all rows if that fits, as far as the first of them show; return whether it did."""
    if clock.left == math.inf:
        return replays.take(order, clock)
    probe, size = clock.part(PROBE), FIRST
    while replays.take(order[len(replays.rows) :][:size], probe):
        waiting = order[len(replays.rows) :]
        if replays.seconds(len(waiting)) <= ALL * clock.left:
            return replays.take(waiting, clock.part(ALL))
        size *= 4  # more rows take less time each
        if replays.seconds(size) > probe.left:
            break
    return False


def _exact(replays: Replays, left_out: LeftOut, clock: Clock) -> Chosen:
    """Return the answer if every row was replayed."""
    first, values = replays.parts[0], torch.empty_like(replays.values)
    values[replays.rows] = replays.values
    exact = torch.ones(len(values), dtype=torch.bool)
    scores = replace(
        first, values=values, train_ids=left_out.names, groups=left_out.named(), exact=exact, cost=replays.cost
    )
    return Chosen(scores, _alone(scores), None, True, scores.cost.seconds, clock.seconds)


def methods_for(run: Run, task: Task, clock: Clock | None = None) -> tuple[Estimator, ...]:
    """List the methods that are worth comparing on a run; raise OutOfTimeError if finding out takes too long."""
    try:
        mild = are_mild(Trajectory(run, task).compared(), clock)
    except LeaveoutError:
        mild = False  # no second derivatives: methods that need them report it themselves
    return (*KINKED, *METHODS) if mild else METHODS


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, LeaveoutError) else first_line(error)


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
    methods: Sequence[Estimator] | None, question: Question, clock: Clock
) -> tuple[dict[str, Scores], dict[str, str]]:
    """Return the scores of every method that can be used in time, by name, and why the others cannot."""
    run, task = question.run, question.task
    scored: dict[Estimator, Scores] = {}
    missing: dict[str, str] = {}
    first: Exception | None = None
    least, before, most = math.inf, clock.spent, clock.part(ESTIMATES)
    asked, open_kinks = (METHODS, True) if methods is None else (methods, False)
    waiting = sorted(sharing(asked, run, task), key=lambda unit: not isinstance(unit[0], TracIn))  # the quickest
    while waiting or (open_kinks and scored):
        if not waiting:  # measuring kinks takes longer than the quickest methods
            open_kinks = False
            try:
                asked = methods_for(run, task, most) if most.left else METHODS
            except OutOfTimeError:
                missing |= {one.name: "left out, as no time was left" for one in KINKED}
            waiting = sharing([one for one in asked if one not in METHODS], run, task)
            continue
        unit = waiting.pop(0)
        if scored and not most.left:
            missing |= {one.resolved(run, task).name: "left out, as no time was left" for one in unit}
            continue
        limit = most if scored else clock
        limited, left = replace(question, resources=question.resources.within(limit)), limit.left
        try:
            scored |= dict(one_by_one(unit, limited))
        except OutOfTimeError as error:
            waiting = [[method] for method in unit[1:]] + waiting  # SGD-IE is quick without the ACC that it was with
            least = min(least, error.seconds)
            suffices = practical(clock.seconds * error.seconds / max(left, clock.seconds / 10))
            needed = f"{SLOW}{_about(error.seconds)}; budget={suffices} for it"
            missing[unit[0].resolved(run, task).name] = needed
        except Exception as error:  # noqa: BLE001 - whatever one method meets, the others may still answer
            if len(unit) > 1:  # which of them cannot be used?
                waiting = [[method] for method in unit] + waiting
                continue
            first = first or error
            missing[unit[0].resolved(run, task).name] = f"cannot be used: {_words(error)}"
    if not scored and least < math.inf:
        raise InputError(
            f"No method fits into budget={clock.seconds:g}, seconds of processor time: the quickest takes about "
            f"{_about(least)}, so give budget={practical(max(clock.seconds, before + least))}.",
            code="budget-too-small",
        )
    if not scored and first is not None:
        raise first
    return {scored[method].method: scored[method] for method in asked if method in scored}, missing


def _with_replays(scores: Scores, rows: list[int], truth: Tensor, cost: Cost) -> Scores:
    """Return the scores with exact values in the rows that were replayed."""
    values = scores.values.clone()
    values[rows] = truth.to(values)
    exact = torch.zeros(len(values), dtype=torch.bool)
    exact[rows] = True
    return replace(scores, values=values, method=f"{scores.method} + Replay", exact=exact, cost=scores.cost + cost)


def _tau(estimate: Tensor, exact: Tensor) -> float:
    tau = kendall(estimate, exact)
    return -1.0 if math.isnan(tau) else tau


def _trust(winner: Scores, scores: Scores, kinds: dict[int, str], exact: Tensor, too_high: float, run: Run) -> Check:
    """Return the check of the winner from all replays, with rank correlations lowered by the optimism of the choice."""
    rows = list(kinds)
    table = pd.DataFrame(
        {"score": winner.mean()[rows].double().cpu().numpy(), "truth": exact.numpy(), "sample": list(kinds.values())},
        index=pd.Index([winner.train_ids[row] for row in rows], name="train"),
    )
    parts = {kind: table[table["sample"] == kind] for kind in ("extreme", "random")}
    agreement = {kind: agreement_of(part).lowered(too_high) for kind, part in parts.items()}
    spread = {kind: float(part["truth"].std()) for kind, part in parts.items()}
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
