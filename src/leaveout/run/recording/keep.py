"""Which states of a run are written to disk."""

from __future__ import annotations

from leaveout.errors import InputError


class Keep:
    """Decides which states are worth their disk space.

    >>> keep = Keep("auto", budget=3)
    >>> [i for i in range(1, 60) if keep.wants(i) and keep.note(i, 1) is None]
    [1, 2, 3, 6, 11, 18, 26, 36, 48]
    """

    def __init__(self, keep: str | int, budget: int) -> None:
        if keep not in ("all", "auto") and not (isinstance(keep, int) and keep >= 1):
            raise InputError(
                f"keep={keep!r} is unknown: use 'all', 'auto', or a number K for every K-th state.", code="keep-unknown"
            )
        self._keep, self._budget = keep, budget
        self._used = 0
        self._next = 1

    def wants(self, index: int) -> bool:
        """Say whether the state before step ``index`` is kept."""
        if isinstance(self._keep, int):
            return index % self._keep == 0
        return self._keep == "all" or index >= self._next

    def note(self, index: int, size: int) -> None:
        """Note that the state was kept, and how much space it took."""
        self._used += size
        # Gaps of 2√i keep about √N of N states.
        self._next = index + 1 if self._used < self._budget else index + max(1, round(2 * index**0.5))
