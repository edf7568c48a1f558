"""Logs the verdict, the top tables and the page to experiment trackers; each needs only its own library.

Nothing is sent anywhere unless one of these functions is called, and then only to the given or active run.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd

from leaveout._util.files import csv_text
from leaveout.errors import InputError
from leaveout.evaluate.check import Check
from leaveout.scores import Scores

NAME = "leaveout"
"""The prefix of everything that is logged."""


def to_wandb(
    scores: Scores, check: Check | None = None, page: str | Path | None = None, *, run: Any = None, k: int = 20
) -> None:
    """Log to a run of Weights & Biases: numbers and verdict in its summary, tables, and the page as an artifact.

    Args:
        scores: the scores to log.
        check: the result of ``verify`` for them.
        page: the file that ``report`` wrote.
        run: what ``wandb.init`` returned; by default the active run.
        k: how many of the most harmful and the most helpful examples the tables have.
    """
    import wandb

    run = run or wandb.run
    if run is None:
        raise InputError("No run of wandb is under way: call wandb.init() first, or give run=.", code="tracker-missing")
    run.summary.update({**_numbers(check), **_words(scores, check)})
    run.log(
        {f"{NAME}/{kind}": wandb.Table(dataframe=table.reset_index()) for kind, table in _tables(scores, k).items()}
    )
    if page is not None:
        artifact = wandb.Artifact(f"{NAME}-report-{run.id}", type="report")
        artifact.add_file(str(page))
        run.log_artifact(artifact)


def to_mlflow(
    scores: Scores,
    check: Check | None = None,
    page: str | Path | None = None,
    *,
    run_id: str | None = None,
    k: int = 20,
) -> None:
    """Log to a run of MLflow: numbers as metrics, the verdict as a tag, tables and the page as artifacts.

    Args:
        scores: the scores to log.
        check: the result of ``verify`` for them.
        page: the file that ``report`` wrote.
        run_id: the id of the run; by default the active one.
        k: how many of the most harmful and the most helpful examples the tables have.
    """
    import mlflow

    if run_id is None:
        active = mlflow.active_run()
        if active is None:
            raise InputError(
                "No run of MLflow is under way: call mlflow.start_run() first, or give run_id=.", code="tracker-missing"
            )
        run_id = active.info.run_id
    client = mlflow.MlflowClient()
    for name, value in _numbers(check).items():
        client.log_metric(run_id, name, value)
    for name, words in _words(scores, check).items():
        client.set_tag(run_id, name, words)
    for kind, table in _tables(scores, k).items():
        client.log_text(run_id, csv_text(table), f"{NAME}/{kind}.csv")
    if page is not None:
        client.log_artifact(run_id, str(page), NAME)


def to_tensorboard(
    writer: Any,
    scores: Scores,
    check: Check | None = None,
    page: str | Path | None = None,
    *,
    step: int | None = None,
    k: int = 20,
) -> None:
    """Log to TensorBoard: numbers as scalars, verdict and tables as texts; the page is copied to the log directory.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``.
        scores: the scores to log.
        check: the result of ``verify`` for them.
        page: the file that ``report`` wrote.
        step: the global step at which it appears.
        k: how many of the most harmful and the most helpful examples the tables have.
    """
    for name, value in _numbers(check).items():
        writer.add_scalar(name, value, step)
    for name, words in _words(scores, check).items():
        writer.add_text(name, words, step)
    for kind, table in _tables(scores, k).items():
        writer.add_text(f"{NAME}/{kind}", _markdown(table), step)
    if page is not None:
        copy = Path(writer.log_dir) / f"{NAME}-{Path(page).name}"
        shutil.copyfile(page, copy)
        writer.add_text(f"{NAME}/report", f"The page is in `{copy.name}`, in the directory of this log.", step)
    writer.flush()


def _numbers(check: Check | None) -> dict[str, float]:
    """Return how well the scores agree with exact replays."""
    if check is None:
        return {}
    samples = {"extreme": check.extreme.kendall, "random": check.random.kendall}
    return {
        f"{NAME}/tau_{name}{end}": float(value)
        for name, tau in samples.items()
        for end, value in (("", tau.value), ("_low", tau.low), ("_high", tau.high))
        if value == value
    }


def _words(scores: Scores, check: Check | None) -> dict[str, str]:
    verdict = "not compared with exact replays" if check is None else check.verdict.value
    sentence = {} if check is None else {f"{NAME}/check": check.sentence}
    return {f"{NAME}/method": scores.method, f"{NAME}/verdict": verdict, **sentence}


def _tables(scores: Scores, k: int) -> dict[str, pd.DataFrame]:
    """Return the most harmful and the most helpful examples with their scores."""
    frame = scores.top(len(scores.train_ids))
    harmful, helpful = (scores.harmful(min(k, scores.harmful_count)), scores.helpful(min(k, scores.helpful_count)))
    return {"harmful": frame.loc[harmful], "helpful": frame.loc[helpful]}


def _markdown(table: pd.DataFrame) -> str:
    rows = [f"| {row.Index} | {row.score:.4g} | {'yes' if row.exact else 'no'} |" for row in table.itertuples()]
    return "\n".join(["| example | score | exact |", "| --- | --- | --- |", *rows])
