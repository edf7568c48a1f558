"""Facts about a run that later commands need, stored beside it by leaveout train, so that no data has to be read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from leaveout._util.files import or_null, read_json, save_json
from leaveout.run.manifest import check_config
from leaveout.run.paths import RunPaths
from leaveout.run.reader import Run

if TYPE_CHECKING:
    from leaveout.builtin.config import Subject


@dataclass(frozen=True)
class Outcome:
    """The result of a training: numbers by name, a sentence, and a warning, if there is a problem."""

    numbers: dict[str, float | None]
    sentence: str
    warning: str


@dataclass(frozen=True)
class Facts:
    """The sizes of a run's data, a checksum of its queries, which labels were flipped, and its outcome."""

    run_fingerprint: int
    train_size: int
    queries: int
    query_fingerprint: int
    flipped: tuple[int, ...] = ()
    outcome: Outcome | None = None


def read_off(run: Run, subject: Subject) -> Facts:
    """Compute the facts from a run's data."""
    from leaveout.estimators.query import query_fingerprint
    from leaveout.task import batches

    size, queries = subject.task.size, batches.size(subject.query)
    return Facts(run.fingerprint, size, queries, query_fingerprint(subject.task, subject.query), subject.flipped)


def keep(run: Run, subject: Subject, outcome: Outcome) -> None:
    """Store the facts about a run that was just trained."""
    plain = replace(outcome, numbers={name: or_null(value) for name, value in outcome.numbers.items()})
    save_json(RunPaths(run.path).training, asdict(replace(read_off(run, subject), outcome=plain)))


def kept(run: Run, task: str | None = None) -> Facts | None:
    """Read the stored facts; None if they are missing or of another run, or if the user gave a task."""
    paths = RunPaths(Path(run.path))
    if task is not None or not paths.training.exists() or not paths.config.exists():
        return None
    check_config(Path(run.path))
    try:
        content = read_json(paths.training)
        outcome = Outcome(**content.pop("outcome"))
        facts = Facts(**{**content, "flipped": tuple(content["flipped"])}, outcome=outcome)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return facts if facts.run_fingerprint == run.fingerprint else None
