"""leaveout cleanse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text
from torch.utils.data import Dataset

from leaveout._util.leftovers import tidy
from leaveout.builtin.config import Subject
from leaveout.cli.app import (
    AsJson,
    MemoryOption,
    ProcessesOption,
    RayOption,
    ResultsOption,
    console,
    opened,
    print_json,
    print_next,
    working,
)
from leaveout.cli.commands import app
from leaveout.cli.facts import kept
from leaveout.cli.subject import TaskOption, later
from leaveout.cli.verify import chosen
from leaveout.errors import InputError
from leaveout.evaluate.cleanse import cleanse as lo_cleanse
from leaveout.evaluate.curve import NOTHING, RANDOM, Curve
from leaveout.evaluate.label_issues import Labels
from leaveout.reporting.answer import amount, removal
from leaveout.run.paths import RunPaths
from leaveout.run.reader import Run
from leaveout.scores import LABELS, MEAN, Scores

SHARES = (0.02, 0.05, 0.1)
"""How many examples are removed by default, as shares of the training set."""


@app.command()
def cleanse(
    run: Annotated[Path, typer.Argument(help="A recorded run that was scored.")],
    remove: Annotated[
        list[int] | None,
        typer.Option(help="How many of the most harmful to remove; may be repeated. 2, 5 and 10 % by default."),
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="Only by these scores; may be repeated.")] = None,
    labels: Annotated[
        bool, typer.Option("--labels", help="Also, or without scores only, remove labels that look wrong.")
    ] = False,
    task: TaskOption = None,
    random: Annotated[int, typer.Option(help="Random choices to compare with, for each number.")] = 5,
    shuffles: Annotated[int, typer.Option(help="0: the recorded batches; k: k fresh orders of the examples.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the random choices and the fresh orders.")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Replace a curve that is there already.")] = False,
    memory: MemoryOption = "auto",
    processes: ProcessesOption = 1,
    ray: RayOption = None,
    results: ResultsOption = None,
    as_json: AsJson = False,
) -> None:
    """Remove the most harmful examples, train again, and measure on the test set.

    [dim]$[/dim] leaveout cleanse runs/digits

    [dim]$[/dim] leaveout cleanse runs/digits --labels

    [dim]$[/dim] leaveout cleanse runs/digits --method acc --remove 10 --remove 50 --shuffles 3

    [dim]$[/dim] leaveout cleanse runs/mine --task mypackage.mymodule:make_task

    Your own task function must return (task, query set, test set) for this. The curve goes to runs/x/cleanse.json.
    """
    recorded, paths = opened(run), RunPaths(run, results)
    out = paths.cleanse
    alone = labels and method is None and not paths.scored()
    files = [] if alone else chosen(recorded, paths, method)
    scores = [Scores.load(file) for file in files]
    if method is None and not alone:
        scores = _rankings(scores, run)
    if labels:
        scores.insert(0, _labels(paths, recorded))
    facts, subject = kept(recorded, task), later(run, task)
    size = subject().task.size if facts is None else facts.train_size
    amounts = remove or sorted({max(1, round(share * size)) for share in SHARES})
    options = {"random": random, "shuffles": shuffles, "seed": seed}
    question = ("cleanse", files, labels, amounts, random, shuffles, seed)
    curve = _answering(out, recorded, scores, amounts, options) if out.exists() and not again else None
    if curve is not None:
        tidy([out])
    else:
        with working(recorded, question, [out], memory, processes, ray) as resources:
            _check_free(out, again)  # another command may have just finished
            trained, test = subject().task, _test(subject())
            curve = lo_cleanse(scores, recorded, trained, test, amounts, **options, resources=resources)
            curve.save(out, overwrite=again)
    if as_json:
        print_json({"run": str(run), "file": str(out), "curve": json.loads(out.read_text())})
    else:
        _print(curve, len(Labels.load(paths.labels)) if paths.labels.exists() else None)
        console.print(f"  {out}", highlight=False, markup=False, soft_wrap=True)
        print_next("score" if alone else "report", run, task, results)


def _print(curve: Curve, wanted: int | None) -> None:
    """Print what the report says, for the number nearest to that of labels that look wrong, then all numbers."""
    first = LABELS if LABELS in curve.choices else curve.choices[0]
    console.print(removal(curve, first, amount(curve, first, wanted)), highlight=False, markup=False)
    table = Table()
    table.add_column("without", no_wrap=True)
    table.add_column(f"test {curve.measure}")
    table.add_column("change, in pairs (95% interval)")
    table.add_row("nothing removed", curve.base, "")
    for choice, removed, value, change in curve.rows():
        table.add_row(Text(curve.removed(choice, removed)), value, change)
    console.print(table)


def _labels(paths: RunPaths, run: Run) -> Scores:
    """Read the ranking of the labels that look wrong."""
    if not paths.labels.exists():
        raise InputError(f"{run.path} has no labels yet: run leaveout labels {run.path} first.", code="labels-missing")
    ranking = Labels.load(paths.labels).to_scores()
    ranking.check_same_run(run)
    return ranking


def _answering(out: Path, run: Run, scores: list[Scores], amounts: list[int], options: dict[str, int]) -> Curve:
    """Return the curve in a file, if it answers this question."""
    curve = Curve.load(out)
    methods = [one for one in scores if one.harmful_count]
    removed = {(one.method, min(m, one.harmful_count)) for one in methods for m in amounts}
    table = curve.table[~curve.table["choice"].isin([NOTHING, RANDOM])]
    draws = curve.table[curve.table["choice"] == RANDOM]
    same = (
        curve.run_fingerprint == run.fingerprint
        and set(zip(table["choice"], table["removed"], strict=True)) == removed
        and curve.harmful == {one.method: one.harmful_count for one in scores}
        and curve.batches == ("shuffled" if options["shuffles"] else "recorded")
        and curve.table["order"].nunique() == max(1, options["shuffles"])
        and (draws["draw"].nunique() == options["random"] * max(1, options["shuffles"]))
    )
    if not same:
        raise InputError(
            f"{out} is of other scores or was asked for with other options: give --again to replace it.",
            code="file-exists",
        )
    return curve


def _check_free(out: Path, again: bool) -> None:
    if out.exists() and not again:
        raise InputError(f"{out} exists already: give --again to replace it.", code="file-exists")


def _rankings(scores: list[Scores], run: Path) -> list[Scores]:
    """Return the plain scores of examples; if there are none, those of single queries, which are averaged."""
    examples = [one for one in scores if isinstance(one.train_ids[0], int)]
    plain = [one for one in examples if one.queries == MEAN]
    each = [one for one in examples if isinstance(one.query_ids[0], int)]
    if not plain and not each:
        raise InputError(
            f"{run} has no scores of single examples for the queries, only of groups or of examples for themselves: "
            f"run leaveout score {run} first.",
            code="scores-not-of-examples",
        )
    return plain or each


def _test(subject: Subject) -> Dataset:
    if subject.test is None:
        raise InputError(
            "This task has no test set: let its function return (task, query set, test set), the last with examples "
            "that neither training nor the scores have seen.",
            code="test-set-missing",
        )
    return subject.test
