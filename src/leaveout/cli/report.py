"""leaveout report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaveout._util.files import check_writable
from leaveout.cli.app import AsJson, MemoryOption, ResultsOption, console, opened, print_json, resumable
from leaveout.cli.commands import app
from leaveout.cli.subject import TaskOption, named, subject_of
from leaveout.cli.verify import chosen
from leaveout.compute.resources import Resources
from leaveout.errors import InputError
from leaveout.evaluate.curve import Curve
from leaveout.evaluate.verify import Check
from leaveout.reporting import Show
from leaveout.reporting import report as lo_report
from leaveout.reporting.show import built_in, show_of
from leaveout.run.paths import RunPaths
from leaveout.scores import Scores


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A recorded run that was scored.")],
    method: Annotated[str | None, typer.Option(help="Whose scores; the newest, of checked ones, by default.")] = None,
    task: TaskOption = None,
    show: Annotated[
        str | None, typer.Option(help="package.module:name of an lo.Show, or of a function that shows an example.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; runs/x/report.html by default.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Replace a report that is there already.")] = False,
    memory: MemoryOption = "auto",
    results: ResultsOption = None,
    as_json: AsJson = False,
) -> None:
    """Write one page to look at: pictures, scores, how far to trust them. It needs no network and no other file.

    [dim]$[/dim] leaveout report runs/digits

    [dim]$[/dim] leaveout report runs/digits --method sgd-ie --out digits.html

    [dim]$[/dim] leaveout report runs/mine --task mypackage.mymodule:make_task --show mypackage.mymodule:picture

    Checks and the cleansing curve beside the run are part of it. Scores with a column for each query (leaveout score
    --queries each) let one look at single queries.
    """
    recorded, paths = opened(run), RunPaths(run, results)
    target = out or paths.report
    check_writable(target)
    if target.exists() and not again:
        raise InputError(
            f"{target} exists already: give --again to replace it, or another name with --out.", code="file-exists"
        )
    files = chosen(recorded, paths, [method] if method else None)
    checked = [file for file in files if paths.check(file).exists()]
    file = max(checked or files, key=lambda one: one.stat().st_mtime)
    scores = Scores.load(file)
    check = Check.load(paths.check(file)) if file in checked else None
    curve = Curve.load(paths.cleanse) if paths.cleanse.exists() else None
    subject = subject_of(run, task) if task or paths.config.exists() else None
    shown = show_of(named(show, "--show")) if show else built_in(subject.data) if subject and subject.data else Show()
    with resumable("Nothing was written."):
        page = lo_report(
            target,
            recorded,
            scores,
            check,
            curve,
            task=subject.task if subject else None,
            query=subject.query if subject else None,
            show=shown,
            overwrite=again,
            resources=Resources(memory),
        )
    if as_json:
        print_json({"run": str(run), "report": str(page), "method": scores.method, "checked": check is not None})
        return
    console.print(f"{scores.method}: {page} (open it in a browser)", highlight=False, markup=False)
    if subject is None:
        console.print("Give --task package.module:function to see the examples themselves.", highlight=False)
    if check is None and not scores.all_exact:
        console.print(f"These scores are not verified: leaveout verify {run} does that.", highlight=False, markup=False)
