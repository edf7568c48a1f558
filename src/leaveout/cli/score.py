"""leaveout score."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from leaveout.beside import Beside
from leaveout.cli.app import (
    AsJson,
    MemoryOption,
    ProcessesOption,
    RayOption,
    app,
    console,
    opened,
    print_json,
    print_next,
    working,
)
from leaveout.cli.made import TaskOption, subject_of
from leaveout.cli.methods import METHODS, parse
from leaveout.config import Subject
from leaveout.errors import InputError
from leaveout.estimators import Estimator
from leaveout.estimators.together import one_by_one
from leaveout.resources import Resources
from leaveout.scores import Scores
from leaveout.store import Run

Groups = dict[str, list[int]]


@app.command()
def score(
    run: Annotated[Path, typer.Argument(help="A recorded run.")],
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"acc by default, may be repeated: {', '.join(METHODS)}, with options in brackets."),
    ] = None,
    task: TaskOption = None,
    queries: Annotated[str, typer.Option(help="mean: their mean loss; each: a column for every query.")] = "mean",
    groups: Annotated[
        Path | None, typer.Option(help='Leave these out together: a JSON file like {"ann": [0, 3], "bob": [1, 2]}.')
    ] = None,
    top: Annotated[int, typer.Option(help="How many of the most harmful and helpful to print.")] = 10,
    again: Annotated[bool, typer.Option("--again", help="Replace scores that are there already.")] = False,
    memory: MemoryOption = "auto",
    processes: ProcessesOption = 1,
    ray: RayOption = None,
    as_json: AsJson = False,
) -> None:
    """Score every training example: how would the query loss change without it?

    [dim]$[/dim] leaveout score runs/digits

    [dim]$[/dim] leaveout score runs/digits --method sgd-ie --method "acc(transport=subspace(16), readout=outputs)"

    [dim]$[/dim] leaveout score runs/mine --task mypackage.mymodule:make_task --queries each

    Methods that share a sweep take it together. Scores go to runs/x/scores, and what is there is not computed again.
    Positive: the loss would rise without the example, so it helped.
    """
    estimators = [parse(text) for text in method or ["acc"]]
    by = None if groups is None else _read_groups(groups)
    recorded = opened(run)
    subject = subject_of(run, task)
    variant = ("each" if queries == "each" else "") + (f" by {groups.stem}" if groups else "")
    told = []
    with working(Beside(run).work("score", estimators, queries, by), memory, processes, ray) as resources:
        for scores, file, new in _scored(recorded, subject, estimators, queries, by, variant, resources, again):
            told.append(_facts(scores, file, top, new))
            if not as_json:
                _show(scores, file, top, new, subject.flipped)
    if as_json:
        print_json({"run": str(run), "scores": told})
    else:
        print_next("verify", run, task)


def _scored(
    run: Run,
    subject: Subject,
    estimators: list[Estimator],
    queries: str,
    groups: Groups | None,
    variant: str,
    resources: Resources,
    again: bool,
) -> Iterator[tuple[Scores, Path, bool]]:
    """Scores with their files, and whether they are new: first those that are there, then each as it is finished."""
    beside, todo = Beside(run.path), []
    for estimator in dict.fromkeys(estimators):
        file = beside.scores(estimator.resolved(run).name, variant)
        if again or not file.exists():
            todo.append(estimator)
            continue
        scores = Scores.load(file)
        asked = estimator.request(run, subject.task, subject.query, queries, groups, False, resources)
        same = (asked.members.names, asked.query.ids, asked.query.fingerprint())
        if same != (scores.train_ids, scores.query_ids, scores.query_fingerprint):
            raise InputError(f"{file} holds scores of other examples or queries: give --again to replace them.")
        yield scores, file, False
    if not todo:
        return
    finished = one_by_one(todo, run, subject.task, subject.query, queries=queries, groups=groups, resources=resources)
    for _, scores in finished:
        file = beside.scores(scores.method, variant)
        yield scores, scores.save(file, overwrite=again), True


def _read_groups(file: Path) -> Groups:
    try:
        raw = json.loads(file.read_text())
        return {str(name): [int(i) for i in ids] for name, ids in raw.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f'{file} holds no groups ({error}): write JSON with ids by name, like {{"ann": [0, 3], "bob": [1, 2]}}.'
        ) from None


def _facts(scores: Scores, file: Path, top: int, new: bool) -> dict[str, Any]:
    values = dict(zip(scores.train_ids, scores.mean().tolist(), strict=True))
    return {
        "method": scores.method,
        "file": str(file),
        "new": new,
        "seconds": scores.cost.seconds,
        "hvps": scores.cost.hvps,
        "harmful": [{"id": i, "score": values[i]} for i in scores.harmful(top)],
        "helpful": [{"id": i, "score": values[i]} for i in scores.helpful(top)],
    }


def _show(scores: Scores, file: Path, top: int, new: bool, flipped: tuple[int, ...]) -> None:
    facts = _facts(scores, file, top, new)
    took = f"{facts['seconds']:.1f} s, {facts['hvps']} Hessian-vector products" if new else "already there"
    console.print(f"\n[bold]{escape(scores.method)}[/bold]: {len(scores.train_ids)} rows, {took}", highlight=False)
    console.print(f"  {file}", highlight=False, markup=False, soft_wrap=True)
    for kind in ("harmful", "helpful"):
        words = ", ".join(f"{row['id']} ({row['score']:+.2g})" for row in facts[kind])
        console.print(f"  most {kind}: {words}", highlight=False, markup=False, soft_wrap=True)
    if flipped and not any(isinstance(i, str) for i in scores.train_ids):
        found = len(set(flipped) & set(scores.harmful(len(flipped))))
        console.print(
            f"  {found} of the {len(flipped)} flipped labels are among the {len(flipped)} most harmful", highlight=False
        )
