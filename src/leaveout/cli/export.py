"""leaveout export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from leaveout._util.files import csv_text, holds, save_text
from leaveout.cli.app import AsJson, ResultsOption, console, opened, print_json
from leaveout.cli.auto import AUTO
from leaveout.cli.commands import app
from leaveout.errors import InputError
from leaveout.evaluate.label_issues import Labels
from leaveout.run.paths import RunPaths, slug
from leaveout.run.reader import Run
from leaveout.scores import Scores

FORMATS = (".csv", ".jsonl", ".json")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A recorded run that was scored, or whose labels were looked at.")],
    out: Annotated[
        Path | None, typer.Option(help="A .csv, .jsonl or .json file; runs/x/examples.csv by default.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Replace a file that holds something else.")] = False,
    results: ResultsOption = None,
    as_json: AsJson = False,
) -> None:
    """Write one table of everything that is known about each training example: labels, scores, which are exact.

    [dim]$[/dim] leaveout export runs/digits

    [dim]$[/dim] leaveout export runs/digits --out digits.jsonl

    A row per training example, in order, so that the columns fit a data frame or a Hugging Face dataset
    (load_dataset("json", data_files="digits.jsonl")).
    """
    recorded, paths = opened(run), RunPaths(run, results)
    target = out or (results or run) / "examples.csv"
    if target.suffix not in FORMATS:
        raise typer.BadParameter(f"{target} must end in {', '.join(FORMATS)}.", param_hint="--out")
    table = gathered(recorded, paths)
    text = _written(table, target.suffix)
    if not holds(target, text):
        if target.exists() and not again:
            raise InputError(
                f"{target} exists already and holds something else: give --again to replace it, or another name with "
                "--out.",
                code="file-exists",
            )
        save_text(target, text)
    if as_json:
        print_json({"run": str(run), "file": str(target), "rows": len(table), "columns": list(table.columns)})
        return
    words = f"{target} has a row for each of {len(table)} training examples:"
    console.print(f"{words} {', '.join(table.columns)}.", highlight=False, markup=False)


def gathered(run: Run, paths: RunPaths) -> pd.DataFrame:
    """Join labels and scores of single examples; columns of scores are named after their files.

    Scores whose method was chosen by measurement are named after that method, unless it has a file too.
    """
    tables = []
    if paths.labels.exists():
        labels = Labels.load(paths.labels)
        if labels.run_fingerprint == run.fingerprint:
            tables.append(labels.to_frame())
    scored = paths.scored()
    stems = {file.stem for file in scored}
    for file in scored:
        scores = Scores.load(file)
        scores.check_same_run(run)
        if all(isinstance(i, int) for i in scores.train_ids):
            name = file.stem
            if (
                name.partition("-")[0] == AUTO
                and (method := slug(scores.method) + name.removeprefix(AUTO)) not in stems
            ):
                name = method
            column = pd.DataFrame({name: scores.mean().tolist()}, index=list(scores.train_ids))
            if scores.exact is not None:
                column[f"{name}_exact"] = scores.exact.tolist()
            tables.append(column)
    if not tables:
        raise InputError(
            f"{run.path} has nothing to export: run leaveout labels {run.path} or leaveout score {run.path} first.",
            code="nothing-to-export",
        )
    return pd.concat(tables, axis=1).sort_index().rename_axis("train")


def _written(table: pd.DataFrame, suffix: str) -> str:
    if suffix == ".csv":
        return csv_text(table)
    rows = table.reset_index().astype(object)
    records = rows.where(rows.notna(), None).to_dict("records")
    if suffix == ".json":
        return json.dumps(records, indent=1) + "\n"
    return "".join(json.dumps(record) + "\n" for record in records)
