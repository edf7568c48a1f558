"""leaveout report."""

from __future__ import annotations

import hashlib
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from leaveout._util.files import check_writable, checksum, save_text
from leaveout.builtin.config import Subject
from leaveout.cli.app import AsJson, MemoryOption, ResultsOption, console, opened, print_json, repeated, resumable
from leaveout.cli.auto import is_of_the_choice
from leaveout.cli.commands import app
from leaveout.cli.subject import TaskOption, named, subject_of
from leaveout.cli.verify import chosen
from leaveout.compute.resources import Resources
from leaveout.errors import InputError
from leaveout.evaluate.check import Check
from leaveout.evaluate.curve import Curve
from leaveout.evaluate.label_issues import Labels
from leaveout.reporting import Page, Show
from leaveout.reporting.show import built_in, show_of
from leaveout.run.paths import RunPaths
from leaveout.run.reader import Run
from leaveout.scores import Scores
from leaveout.study.answers import most_trusted, same_rows
from leaveout.study.report import report as lo_report


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A recorded run that was scored.")],
    method: Annotated[
        str | None, typer.Option(help="Whose scores; by default all, exact or best verified ones first.")
    ] = None,
    task: TaskOption = None,
    show: Annotated[
        str | None, typer.Option(help="package.module:name of an lo.Show, or of a function that shows an example.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; runs/x/report.html by default.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Replace a report that is there already.")] = False,
    memory: MemoryOption = "auto",
    results: ResultsOption = None,
    as_json: AsJson = False,
) -> None:
    """Write one page to look at: pictures, scores, how far to trust them. It needs no network and no other file.

    [dim]$[/dim] leaveout report runs/digits --open

    [dim]$[/dim] leaveout report runs/digits --method sgd-ie --out digits.html

    [dim]$[/dim] leaveout report runs/mine --task mypackage.mymodule:make_task --show mypackage.mymodule:picture

    Checks and the cleansing curve beside the run are part of it. Scores with a column for each query (leaveout score
    --queries each) let one look at single queries.
    """
    recorded, paths = opened(run), RunPaths(run, results)
    target = out or paths.report
    check_writable(target)
    methods, checks = _answers(chosen(recorded, paths, [method] if method else None), paths)
    curve = Curve.load(paths.cleanse) if paths.cleanse.exists() else None
    labels = _labels(paths, recorded)
    inputs = [*(file for file in (paths.cleanse, paths.labels) if file.exists()), *paths.scored(), *paths.checked()]
    stamp = _stamp(inputs, (method, task, show))
    there = target.exists() and not again
    if there and stamp not in target.read_text(encoding="utf-8", errors="replace"):
        raise InputError(
            f"{target} exists already: give --again to replace it, or another name with --out.", code="file-exists"
        )
    known = bool(task) or paths.config.exists()
    if not there:
        subject = subject_of(run, task) if known else None
        shown = _show(show, subject)
        with resumable("Nothing was written."):
            lo_report(
                target,
                recorded,
                methods,
                list(checks.values()),
                curve,
                labels=labels,
                task=subject.task if subject else None,
                query=subject.query if subject else None,
                show=shown,
                overwrite=again,
                resources=Resources(memory),
            )
            save_text(target, f"{target.read_text(encoding='utf-8')}{stamp}\n")
    scores = methods[0]
    if open_page:
        webbrowser.open(target.resolve().as_uri())
    if as_json:
        print_json(
            {"run": str(run), "report": str(target), "method": scores.method, "checked": scores.method in checks}
        )
        return
    for headline in Page(target).headlines:
        console.print(f"{headline}.", highlight=False, markup=False)
    words = f"\n{target} (open it in a browser; the scores are {scores.method}'s)"
    console.print(words, highlight=False, markup=False, soft_wrap=True)
    if not known:
        console.print("Give --task package.module:function to see the examples themselves.", highlight=False)
    if scores.method not in checks and not scores.all_exact:
        words = f"These scores are not verified: leaveout verify {run}{repeated(task, results)} does that."
        console.print(words, highlight=False, markup=False, soft_wrap=True)


def _show(name: str | None, subject: Subject | None) -> Show:
    """Return how examples are shown: as the option says, else as suits built-in data, else by their type."""
    if name:
        return show_of(named(name, "--show"))
    return built_in(subject.data) if subject and subject.data else Show()


def _labels(paths: RunPaths, run: Run) -> Labels | None:
    """Load the labels beside the run, unless they are of another run."""
    labels = Labels.load(paths.labels) if paths.labels.exists() else None
    return labels if labels is None or labels.run_fingerprint == run.fingerprint else None


def _answers(files: list[Path], paths: RunPaths) -> tuple[list[Scores], dict[str, Check]]:
    """Load the scores that can be shown together, the most trustworthy first, and their checks by method."""
    scores: list[Scores] = []
    checks: dict[str, Check] = {}
    for file in sorted(files, key=lambda one: one.stat().st_mtime):
        one = Scores.load(file)
        scores = [*(other for other in scores if other.method != one.method), one]  # the newer of two variants
        before = checks.pop(one.method, None)
        if paths.check(file).exists():
            checks[one.method] = Check.load(paths.check(file))
        elif before is not None and is_of_the_choice(before, one):
            checks[one.method] = before  # chosen scores that were refined later
    first = most_trusted(scores, checks)
    assert first is not None  # noqa: S101 - chosen refuses a run without scores
    together = [first, *(one for one in scores if one is not first and same_rows(one, first))]
    return together, {one.method: checks[one.method] for one in together if one.method in checks}


def _stamp(files: list[Path], options: tuple[str | None, ...]) -> str:
    """Return a comment for the end of the page that identifies what it was built from."""
    sums = [f"{file.name} {checksum(file):08x}" for file in sorted(files)]
    return f"<!-- {hashlib.sha256(repr((sums, options)).encode()).hexdigest()} -->"
