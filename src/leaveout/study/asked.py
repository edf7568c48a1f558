"""What scores answer, as one value: equal questions have the same answer, different ones never replace each other's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from leaveout.scores import SELF, Scores


@dataclass(frozen=True)
class Asked:
    """The full question that scores answer.

    ``method`` is the estimator's name with its options; ``rows`` are the left-out examples or groups, with their
    ``members`` if they are groups; ``columns`` are the query ids and ``queries`` the fingerprint of the query set;
    ``unit`` is what is measured; ``run`` the fingerprint of the run, which for ``at=n`` is that of its first n steps.
    What an older file does not say is None.
    """

    method: str
    rows: tuple[int | str, ...]
    members: tuple[tuple[int, ...], ...] | None
    columns: tuple[int | str, ...]
    queries: int | None
    unit: str
    run: int | None

    @classmethod
    def of(cls, scores: Scores) -> Asked:
        """Read off scores which question they answer."""
        members = None
        if scores.groups is not None:
            members = tuple(tuple(scores.groups[str(name)]) for name in scores.train_ids)
        return cls(
            *(scores.method, scores.train_ids, members, scores.query_ids, scores.query_fingerprint),
            *(scores.unit, scores.run_fingerprint),
        )

    def everyone(self, size: int) -> bool:
        """Return whether every training example was left out by itself, and the loss of queries is explained."""
        return self.rows == tuple(range(size)) and self.columns != (SELF,)

    @property
    def kind(self) -> Asked:
        """The question without its method and queries: scores of the same kind can be shown side by side."""
        own = (SELF,) if self.columns == (SELF,) else ()
        return replace(self, method="", columns=own, queries=None, unit="")
