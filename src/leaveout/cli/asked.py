"""Checks by sizes and checksums of the data whether scores on disk answer a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leaveout.cli.facts import Facts
from leaveout.errors import InputError
from leaveout.scores import MEAN, Scores
from leaveout.trajectory.left_out import leave_out


@dataclass(frozen=True)
class Asked:
    """A command's question about a run: each query or their mean, single examples or groups."""

    facts: Facts
    queries: str
    groups: dict[str, Any] | None

    def answered(self, file: Path, method: str | None, ids: Sequence[int] | None = None) -> Scores:
        """Read scores from disk; refuse those of another question. Without a ``method``, any method is accepted."""
        scores = Scores.load(file)
        if other := self._difference(scores, method or scores.method, ids):
            raise InputError(f"{file} holds scores of {other}: give --again to replace them.", code="scores-in-the-way")
        return scores

    def _difference(self, scores: Scores, method: str, ids: Sequence[int] | None) -> str | None:
        """Say how scores differ from the requested ones; facts that an older file does not contain are not compared."""
        facts, left_out = self.facts, leave_out(self.facts.train_size, ids, self.groups)
        columns = tuple(range(facts.queries)) if self.queries == "each" else (MEAN,)
        if scores.run_fingerprint not in (None, facts.run_fingerprint):
            return "another run"
        if scores.method != method:
            return f"another method, {scores.method}"
        if (scores.train_ids, scores.query_ids) != (left_out.names, columns):
            return "other examples or queries"
        if scores.query_fingerprint not in (None, facts.query_fingerprint):
            return "other examples or queries"
        return "groups with other members" if scores.groups not in (None, left_out.named()) else None
