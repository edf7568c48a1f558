"""Compares scores with exact replays, and exact replays with those from moved starts, on a sample of the examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import Dataset

from leaveout.compute.clock import Clock, check_budget, practical
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, is_whole, kind_of
from leaveout.estimators.question import Question
from leaveout.estimators.replay import JITTER, Replay, replayed
from leaveout.evaluate.ceiling import GROUPS, MOVE, ceiling_of
from leaveout.evaluate.check import MINIMUM, Check, agreement_of
from leaveout.evaluate.replays import Replays, shortened
from leaveout.evaluate.selection import in_turns, others
from leaveout.evaluate.verdict import Verdict
from leaveout.run.reader import Run
from leaveout.scores import Scores
from leaveout.task.task import Task

MOVES = 2
"""The number of moved starts that are replayed if scores and truth disagree, or if the scores are the truth."""
DOUBTED = (Verdict.HINT, Verdict.NONE)
"""Verdicts whose cause is looked for."""
BUDGET = 60.0
"""Seconds of processor time for a check, if not said otherwise."""


def verify(
    scores: Scores,
    run: Run,
    task: Task,
    query: Dataset,
    *,
    replays: int = 64,
    seed: int = 0,
    budget: float = BUDGET,
    moves: int | None = None,
    jitter: float = JITTER,
    groups: bool | None = None,
    resources: Resources | None = None,
) -> Check:
    """Replay the run exactly without the most extreme examples, and without a random sample of the rest.

    Half of the replays go to each. Scores for several queries are compared by their mean over the queries.

    If scores disagree with the replays, either may be the cause: an effect that changes with the last digits of the
    start is not a property of the training, and no method can predict it. So the same examples are replayed from moved
    starts too, with and without each example, and the check says how reproducible the truth is: its ``ceiling``. Each
    move costs as much as the replays themselves; if single examples have no reproducible effect, a few random groups
    of growing size are replayed twice, to find the size from which on there is one.

    All of this stops when the budget is used up. What did not fit is said, with the budget that it would take; fewer
    than 8 replays are too few to tell.

    Rows that are exact already (``refine``, ``choose``) would be compared with themselves: the check is of the others.
    Scores that are all exact replays have nothing to be compared with. For them this is the only question: are the
    effects a property of the training, or of its last digits?

    Args:
        scores: scores of single examples or of groups.
        run: the run that was scored.
        task: what was trained.
        query: the query set that was scored.
        replays: how many examples to replay, at most.
        seed: for the random sample, and for the moves.
        budget: seconds of processor time, those of all threads together (with an engine, seconds by the wall).
        moves: from how many moved starts to replay; by default from two if the scores' ranking is only a hint or worse
            or if they are exact, and otherwise from none.
        jitter: the size of a move, relative to the initial parameters.
        groups: whether to look for the group size from which on effects are reproducible, if those of single examples
            are not: 48 more replays for every size that is tried; by default if they fit the budget.
        resources: memory budget and progress.
    """
    left = _checked(scores, replays, moves, budget)
    question = Question(run, task, query, resources=resources or Resources())
    exact = scores.all_exact and scores.run_fingerprint == run.fingerprint and moves != 0
    work = _Comparison(scores, question, left, dict(in_turns(*chosen(scores, replays, seed))), exact)
    clock = question.resources.started(budget)
    recorded, rows = work.replays(), list(work.kinds)
    if exact:
        check = work.check(rows, scores.values[rows])
    else:
        # Moved starts follow if the verdict is bad: half of the time is theirs, unless it is known that they do not.
        recorded.take(rows, clock.part(0.5 if moves is None else 1 / (1 + moves)))
        if not recorded.rows and not recorded.take(rows, clock) and not recorded.rows:
            raise _too_short(clock, recorded.seconds(2 * MINIMUM))
        check = work.check(recorded.rows, recorded.values)
        if len(recorded.rows) < len(rows) and moves is None and check.verdict not in DOUBTED:
            recorded.take(rows[len(recorded.rows) :], clock)
            check = work.check(recorded.rows, recorded.values)
    if moves is None:
        moves = MOVES if (exact or check.verdict in DOUBTED) and not check.void else 0
    cost, rate, fitted = recorded.cost, recorded.rate, 0
    while fitted < moves:
        moved = work.replays(Replay(move=seed + fitted + 1, jitter=jitter), rate)
        compared = rows[: len(check.table)]
        if exact and not fitted:  # these are the first replays, so they tell how many rows fit
            moved.take(compared, clock.part(1 / moves))
            check = work.check(moved.rows, scores.values[moved.rows]) if moved.rows else check
        elif moved.fitting(len(compared), clock) < len(compared) or not moved.take(compared, clock):
            cost = cost + moved.cost
            break
        cost, rate = cost + moved.cost, moved.rate
        if len(moved.rows) < 2 * MINIMUM:
            break
        fitted += 1
        check.table[f"{MOVE}{fitted}"] = _means(moved.values)
    check = replace(
        check,
        cost=cost,
        budget=float(budget),
        omitted=_omitted(clock, rate or 0.0, (len(check.table), len(rows)), (fitted, moves)),
    )
    if not fitted:
        return check
    if groups is None:
        groups = clock.left >= (rate or 0.0) * 2 * (GROUPS + 1)
    question = replace(question, resources=question.resources.within(clock))
    ceiling, cost = ceiling_of(check.table, scores, question, seed, jitter, sizes=groups)
    return replace(check, cost=check.cost + cost, ceiling=ceiling)


@dataclass(frozen=True)
class _Comparison:
    """Scores, which of them are compared with replays of which run, and in which sample each is."""

    scores: Scores
    question: Question
    left: int
    kinds: dict[int, str]
    exact: bool

    def replays(self, start: Replay | None = None, rate: float | None = None) -> Replays:
        """Return replays from a start, none of which is done yet."""

        def truth(rows: Sequence[int], clock: Clock) -> Scores:
            resources = self.question.resources.within(clock)
            return replayed(self.scores, rows, replace(self.question, resources=resources), start)

        return Replays(truth, rate)

    def check(self, rows: Sequence[int], truth: Tensor) -> Check:
        """Compare the scores of these rows with the truth."""
        table = pd.DataFrame(
            {
                "score": _means(self.scores.values[list(rows)]),
                "truth": _means(truth),
                "sample": [self.kinds[row] for row in rows],
            },
            index=pd.Index([self.scores.train_ids[row] for row in rows], name="train"),
        )
        # Scores that are not changes of the loss are compared by their order only.
        effect = self.scores.is_effect
        agreement, spread = {}, {}
        for kind in ("extreme", "random"):
            part = table[table["sample"] == kind]
            agreement[kind] = agreement_of(part, sampled=len(table) < self.left)
            spread[kind] = float(part["truth"].std()) if effect else math.nan
        return Check(
            *(agreement["extreme"], agreement["random"], spread, table, self.scores.method, Cost()),
            run_fingerprint=self.question.run.fingerprint,
            exact=self.exact,
            replaced=len(self.scores.train_ids) - self.left,
            queries=len(self.scores.query_ids),
        )


def _means(values: Tensor) -> np.ndarray:
    """Return the mean over the queries of each row."""
    return values.mean(1).double().cpu().numpy()


def _omitted(clock: Clock, rate: float, rows: tuple[int, int], moves: tuple[int, int]) -> str:
    """Say what did not fit, and which budget would do; each pair is how many were done, of how many."""
    words = [
        f"{done} of {wanted} {what}"
        for (done, wanted), what in ((rows, "replays"), (moves, "moved starts"))
        if done < wanted
    ]
    if not words:
        return ""
    more = rate * ((rows[1] - rows[0] + 1) + (moves[1] - moves[0]) * (rows[1] + 1))
    return shortened(" and ".join(words), clock, more)


def _too_short(clock: Clock, seconds: float) -> InputError:
    return InputError(
        f"Not one replay fits into budget={clock.seconds:g}, seconds of processor time: {2 * MINIMUM} of them, the "
        f"fewest that tell anything, take budget={practical(clock.spent + seconds)}.",
        code="budget-too-small",
    )


def _checked(scores: Scores, replays: int, moves: int | None, budget: float) -> int:
    """Refuse what cannot be compared; return how many scores are left to compare with replays."""
    if not isinstance(scores, Scores):
        raise InputError(
            f"Scores are needed first, not {kind_of(scores)}: call verify(scores, run, task, query).",
            code="scores-expected",
        )
    if len(scores.train_ids) < 2 * MINIMUM or not is_whole(replays, 2 * MINIMUM):
        raise InputError(
            f"verify needs at least {2 * MINIMUM} scored examples or groups, and replays: it compares rankings. For "
            "fewer, Replay().score(...) gives exact scores.",
            code="too-few-to-compare",
        )
    if moves is not None and not is_whole(moves, 0):
        raise InputError(f"moves={moves!r} must be a whole number, 0 or more, or None.", code="moves-not-a-count")
    check_budget(budget)
    if (left := len(comparable(scores))) < 2 * MINIMUM:
        raise InputError(
            f"Only {left} of the {len(scores.train_ids)} scores are estimates, too few to compare rankings: "
            f"refine(..., top={len(scores.train_ids)}) makes them exact too.",
            code="too-few-estimates",
        )
    return left


def comparable(scores: Scores) -> list[int]:
    """Return the rows to compare with replays, by ascending score: the estimates, or all rows if there are none."""
    order = torch.argsort(scores.mean(), stable=True).tolist()
    if scores.exact is None or scores.all_exact:
        return order
    exact = scores.exact.tolist()
    return [row for row in order if not exact[row]]


def chosen(scores: Scores, replays: int, seed: int) -> tuple[list[int], list[int]]:
    """Choose the rows to replay: half the most extreme, half from each tail, and a random sample of the rest.

    Rows that are exact replays are passed over, unless all are. The most extreme come first, from both tails in turns.
    """
    order = comparable(scores)
    replays = min(replays, len(order))
    half = max(MINIMUM, replays // 2)
    low = half // 2
    high = order[: len(order) - 1 - (half - low) : -1]
    extreme = [row for pair in zip_longest(high, order[:low]) for row in pair if row is not None]
    return extreme, others(extreme, order, replays - half, seed)
