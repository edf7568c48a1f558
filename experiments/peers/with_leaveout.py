"""leaveout's own answers, and the truth."""

from __future__ import annotations

from collections.abc import Iterator

from estimate import Estimate, timed
from subjects import Subject
from torch import Tensor

import leaveout as lo

QUIET = lo.Resources(progress=False, memory="3GB")


def truth(subject: Subject) -> Estimate:
    """Train again without each of the subject's ids."""
    return timed("Replay", "the truth", lambda: _scored(lo.Replay(), subject, ids=subject.ids))


def estimates(subject: Subject) -> Iterator[Estimate]:
    """Score by the default, by SGD-IE, and where the model has one logit by the outputs readout."""
    yield timed("ACC", "default", lambda: _scored(lo.ACC(), subject))
    if subject.binary:
        yield timed("ACC", "outputs readout", lambda: _scored(lo.ACC(readout="outputs"), subject))
    yield timed("SGD-IE", "default", lambda: _scored(lo.SGDIE(), subject))
    yield timed("DVEmb", "default", lambda: _scored(lo.DVEmb(), subject))
    yield timed("TracIn", "every step", lambda: _scored(lo.TracIn(), subject))


def _scored(estimator: lo.Estimator, subject: Subject, **options: object) -> Tensor:
    return estimator.score(subject.run, subject.task, subject.query, resources=QUIET, **options).mean()
