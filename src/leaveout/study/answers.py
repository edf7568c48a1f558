"""Which of the answers to act on, and which can be shown side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from leaveout.evaluate.check import Check
from leaveout.evaluate.refine import with_truths
from leaveout.scores import Scores
from leaveout.study.asked import Asked


def most_trusted(scores: Sequence[Scores], checks: Mapping[str, Check]) -> Scores | None:
    """Choose the scores to act on: exact ones, else those with the best verdict, else the newest, which is the last."""

    def rank(place: int) -> tuple[int, float, int]:
        one = scores[place]
        check = checks.get(one.method)
        tau = -2.0 if check is None else min(check.extreme.kendall.low, check.random.kendall.low)
        kind = 2 if one.all_exact else int(check is not None)
        return kind, -2.0 if math.isnan(tau) else tau, place

    return scores[max(range(len(scores)), key=rank)] if scores else None


def same_kind(answers: Mapping[Asked, Scores], size: int, run: int) -> list[Asked]:
    """Return the questions about the same rows, the newest last: about every example, else those that came last."""
    whole = [asked for asked in answers if asked.everyone(size) and asked.run in (None, run)]
    chosen = whole[-1] if whole else next(reversed(list(answers)), None)
    return [asked for asked in answers if chosen is not None and asked.kind == chosen.kind]


def by_method(asked: Sequence[Asked], checks: Mapping[Asked, Check]) -> dict[str, Asked]:
    """Return one question per method, the newest last: verified ones first, then those with a column per query."""
    chosen: dict[str, Asked] = {}
    for one in asked:
        before = chosen.pop(one.method, one)
        chosen[one.method] = max(before, one, key=lambda other: (other in checks, len(other.columns), other is one))
    return chosen


def same_rows(scores: Scores, first: Scores) -> bool:
    """Return whether two methods' scores can be shown side by side."""
    return Asked.of(scores).kind == Asked.of(first).kind


def in_words(scores: Scores, check: Check | None) -> str:
    """Say how many did harm, and how far that can be trusted, in one line."""
    verdict = "not verified" if check is None else check.short
    if scores.all_exact and not (check and check.exact):
        verdict = "exact for this run"
    return f"{(scores if check is None else with_truths(scores, check.truths)).harm}; {verdict}"
