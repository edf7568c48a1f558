"""The report: one self-contained page about a run, its scores, and how far to trust them.

``gather`` turns a ``topic`` (a run, its scores, its data) into the plain data of ``content``; ``page``
makes the HTML of that alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from leaveout._util.files import check_writable, free, save_text
from leaveout.compute.resources import Resources
from leaveout.errors import InputError
from leaveout.evaluate.curve import Curve
from leaveout.evaluate.verify import Check
from leaveout.reporting.cleansing import cleansing
from leaveout.reporting.gather import gather
from leaveout.reporting.page import page
from leaveout.reporting.show import Show, show_of
from leaveout.reporting.topic import Topic
from leaveout.run.reader import Run
from leaveout.scores import Scores
from leaveout.task.task import Task

__all__ = ["Show", "report"]


def report(
    path: str | Path,
    run: Run,
    scores: Scores,
    check: Check | None = None,
    curve: Curve | None = None,
    *,
    task: Task | None = None,
    query: Dataset | None = None,
    show: Show | Callable[[Any], Any] | None = None,
    overwrite: bool = False,
    resources: Resources | None = None,
) -> Path:
    """Write one HTML page that needs no network and no other file.

    Args:
        path: the file to write; an existing one is replaced only with ``overwrite=True``.
        run: the recorded run.
        scores: what is reported.
        check: what ``verify`` found of these scores; without it the page says that nobody checked.
        curve: what ``cleanse`` found.
        task: what was trained; with it the page shows examples, labels and what the model says of them.
        query: the query set that was scored; with it the page tells when influence arose, and shows the queries.
        show: how examples are shown, by a ``Show`` or by a function of an example; by default pictures, texts or rows.
        overwrite: replace an existing file.
        resources: memory budget and progress.
    """
    check_writable(Path(path))
    path = free(path, overwrite=overwrite)
    scores.check_same_run(run)
    _check_finite(scores)
    if curve is not None:
        curve.check_same_run(run)
    topic = Topic(run, scores, task, query, show_of(show), resources or Resources())
    text = page(gather(topic, check, cleansing(curve) if curve else None))
    save_text(path, text)
    return path


def _check_finite(scores: Scores) -> None:
    broken = (~torch.isfinite(scores.values)).nonzero()
    if len(broken):
        raise InputError(
            f"The score of {scores.train_ids[int(broken[0, 0])]!r} is NaN or infinite: score the run again, or leave "
            "that row out.",
            code="score-not-finite",
        )
