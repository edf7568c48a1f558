"""leaveout labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from leaveout._util.files import csv_text, holds
from leaveout._util.leftovers import tidy
from leaveout.cli.app import AsJson, MemoryOption, ResultsOption, console, opened, print_json, print_next, working
from leaveout.cli.commands import app
from leaveout.cli.facts import kept
from leaveout.cli.subject import TaskOption, subject_of
from leaveout.cli.verify import chosen
from leaveout.errors import InputError
from leaveout.evaluate.check import Check
from leaveout.evaluate.dynamics import STATES
from leaveout.evaluate.label_issues import AUTO, Labels, Question
from leaveout.evaluate.labels import labels as lo_labels
from leaveout.run.paths import RunPaths
from leaveout.run.reader import Run
from leaveout.scores import Scores


@app.command()
def labels(
    run: Annotated[Path, typer.Argument(help="A recorded run of a classifier.")],
    task: TaskOption = None,
    folds: Annotated[
        str,
        typer.Option(
            help="Train again this often, each time without a part, and judge every label out of sample; 0 for never, "
            "auto for 5 where the run may have memorised its labels and a minute is enough."
        ),
    ] = AUTO,
    method: Annotated[
        str | None, typer.Option(help="Scores that were verified, to be mixed in as far as they can be trusted.")
    ] = None,
    states: Annotated[int, typer.Option(help="How many recorded states to look at.")] = STATES,
    seed: Annotated[int, typer.Option(help="Of the division into folds.")] = 0,
    top: Annotated[int, typer.Option(min=0, help="How many to show.")] = 20,
    csv: Annotated[Path | None, typer.Option(help="Write a row for every example to this file.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Replace what is there already.")] = False,
    memory: MemoryOption = "auto",
    results: ResultsOption = None,
    as_json: AsJson = False,
) -> None:
    """Say which training labels look wrong, from the recorded run alone: no query is needed.

    [dim]$[/dim] leaveout labels runs/digits

    [dim]$[/dim] leaveout labels runs/digits --csv labels.csv --again

    [dim]$[/dim] leaveout labels runs/mine --task mypackage.mymodule:make_task --folds 5

    The answer goes to runs/x/labels.json, and is read from there the next time.
    """
    recorded, paths = opened(run), RunPaths(run, results)
    out = paths.labels
    scores, check = _verified(recorded, paths, method)
    parts = _folds(folds)
    question = Question(states, parts, seed, None if scores is None else scores.method)
    flipped: tuple[int, ...] = ()
    if out.exists() and not again:
        answer = _answering(out, recorded, question)
        tidy([out])
        if task is None:
            facts = kept(recorded)
            flipped = subject_of(run, task).flipped if facts is None else facts.flipped
    else:
        subject = subject_of(run, task)
        flipped = subject.flipped
        with working(recorded, ("labels", question), [out], memory) as resources:
            answer = lo_labels(
                recorded,
                subject.task,
                scores=scores,
                check=check,
                folds=parts,
                states=states,
                classes=() if subject.data is None else subject.data.classes,
                seed=seed,
                resources=resources,
            )
            answer.save(out, overwrite=again)
    if csv is not None and not holds(csv, csv_text(answer.table)):
        answer.to_csv(csv, overwrite=again)
    if as_json:
        print_json(_content(answer, run, out, top))
    else:
        _print(answer, flipped, [out, *([csv] if csv else [])], top)
        found = len(answer) and task is None  # a user's task may have no test set
        print_next("cleanse --labels" if found else "score", run, task, results)


def _folds(words: str) -> int | str | None:
    """Parse the option: a number, 0 for none, or auto."""
    if words == AUTO:
        return AUTO
    if not words.isdecimal() or words == "1":
        raise typer.BadParameter(f"--folds {words!r} is neither auto nor a number (0, or 2 and more)")
    return int(words) or None


def _verified(run: Run, paths: RunPaths, method: str | None) -> tuple[Scores | None, Check | None]:
    """Return the scores of a method and their check, which must exist."""
    if method is None:
        return None, None
    file = chosen(run, paths, [method])[0]
    place = paths.check(file)
    if not place.exists():
        raise InputError(
            f"{file} was not verified, so it is not known how far to trust it: run leaveout verify {run.path} "
            f"--method {method!r} first.",
            code="scores-not-verified",
        )
    return Scores.load(file), Check.load(place)


def _answering(file: Path, run: Run, question: Question) -> Labels:
    """Return the labels in a file, if they answer this question about this run."""
    answer = Labels.load(file)
    if answer.question != question or answer.run_fingerprint != run.fingerprint:
        raise InputError(
            f"{file} is of another run or was asked for with other options: give --again to replace it.",
            code="labels-of-other-question",
        )
    return answer


def _content(answer: Labels, run: Path, out: Path, top: int) -> dict[str, Any]:
    rows = answer.ranked(top)
    shown = rows.astype(object).where(rows.notna(), None).reset_index().to_dict("records")
    return {
        "run": str(run),
        "file": str(out),
        "sentence": answer.sentence,
        "count": len(answer),
        "ids": answer.ids,
        "influence_weight": answer.weight,
        "rows": shown,
    }


def _print(answer: Labels, flipped: tuple[int, ...], files: list[Path], top: int) -> None:
    console.print(str(answer), highlight=False, markup=False)
    issues = answer.issues[:top]
    if len(issues):
        table = Table("example", "given → suggested", "label score", "why")
        for row in issues.itertuples():
            words = f"{row.given_label} → {row.predicted_label}"
            table.add_row(str(row.Index), Text(words), f"{row.label_score:.3f}", Text(str(row.why)))
        console.print(table)
    if len(answer) > top:
        console.print(f"  and {len(answer) - top} more: --top {len(answer)}, or --csv", highlight=False)
    if answer.question.influence is not None:
        counts = f"counts with weight {answer.weight:.2f}" if answer.weight else "does not count"
        words = f"{answer.question.influence} {counts} beside what the run showed (docs/labels.md says why)."
        console.print(words, highlight=False, markup=False)
    if flipped:
        count = len(flipped)
        hits = len(set(flipped) & set(answer.ranked(count).index))
        console.print(f"  {hits} of the {count} flipped labels are among the first {count}", highlight=False)
    for file in files:
        console.print(f"  {file}", highlight=False, markup=False, soft_wrap=True)
