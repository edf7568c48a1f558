"""How far scores can be trusted given their agreement with exact replays, as a verdict."""

from __future__ import annotations

from enum import Enum

from leaveout.evaluate.metrics import Interval


class Verdict(Enum):
    """How far a ranking can be trusted, from best to worst, each with the sentence that says so."""

    GOOD = "the ranking can be trusted"
    COARSE = "the ranking is right overall, but not in detail"
    HINT = "the ranking is only a hint"
    NONE = "the ranking cannot be trusted"
    FEW = "too few replays to tell"

    @classmethod
    def of(cls, tau: Interval) -> Verdict:
        """Judge a rank correlation with the truth by the lower end of its interval.

        >>> Verdict.of(Interval(0.95, 0.9, 0.98)).value
        'the ranking can be trusted'
        """
        if tau.low >= cls.GOOD.least:
            return cls.GOOD
        if tau.low >= cls.COARSE.least:
            return cls.COARSE
        return cls.HINT if tau.low > 0 else cls.NONE

    @property
    def least(self) -> float:
        """The least that the lower end of a rank correlation's interval must be for this verdict."""
        return {"GOOD": 0.8, "COARSE": 0.5, "HINT": 0.0, "NONE": -1.0}[self.name]

    @property
    def level(self) -> str:
        """A word for the report's style: good, coarse, hint, none or unchecked."""
        return "unchecked" if self is Verdict.FEW else self.name.lower()

    @staticmethod
    def worst(*verdicts: Verdict) -> Verdict:
        """Return the most cautious of several verdicts."""
        return max(verdicts, key=list(Verdict).index)
