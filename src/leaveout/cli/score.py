"""leaveout score."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from leaveout._util.leftovers import tidy
from leaveout.cli import auto
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
from leaveout.cli.asked import Asked
from leaveout.cli.auto import AUTO
from leaveout.cli.commands import app
from leaveout.cli.facts import kept, read_off
from leaveout.cli.methods import NAMES, parse
from leaveout.cli.subject import TaskOption, subject_of
from leaveout.errors import InputError
from leaveout.estimators import Estimator
from leaveout.estimators.question import Question
from leaveout.estimators.several import one_by_one
from leaveout.evaluate.check import MINIMUM
from leaveout.evaluate.choose import Chosen
from leaveout.run.paths import RunPaths
from leaveout.run.reader import Run
from leaveout.scores import Scores

Groups = dict[str, Any]
Files = dict[Estimator | None, Path]
QUERIES = ("mean", "each")


@app.command()
def score(
    run: Annotated[Path, typer.Argument(help="A recorded run.")],
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"May be repeated: auto (the default), {', '.join(NAMES)}, with options in brackets."),
    ] = None,
    task: TaskOption = None,
    queries: Annotated[str, typer.Option(help="mean: their mean loss; each: a column for every query.")] = "mean",
    groups: Annotated[
        Path | None, typer.Option(help='Leave these out together: a JSON file like {"ann": [0, 3], "bob": [1, 2]}.')
    ] = None,
    budget: Annotated[
        float, typer.Option(min=0, help="auto: seconds for exact replays, of all examples or of a sample.")
    ] = 60.0,
    top: Annotated[int, typer.Option(min=0, help="How many of the most harmful and helpful to print.")] = 10,
    again: Annotated[bool, typer.Option("--again", help="Replace scores that are there already.")] = False,
    memory: MemoryOption = "auto",
    processes: ProcessesOption = 1,
    ray: RayOption = None,
    results: ResultsOption = None,
    as_json: AsJson = False,
) -> None:
    """Score every training example: how would the query loss change without it?

    [dim]$[/dim] leaveout score runs/digits

    [dim]$[/dim] leaveout score runs/digits --method sgd-ie --method "acc(transport=subspace(16), readout=outputs)"

    [dim]$[/dim] leaveout score runs/mine --task mypackage.mymodule:make_task --queries each

    Without --method, all examples are replayed exactly if that fits the budget; otherwise several methods score them
    and are compared with exact replays of a sample, and the best one's scores are kept, with their check.

    Methods that share a sweep take it together. Scores go to runs/x/scores, and what is there is not computed again.
    Positive: the loss would rise without the example, so it helped. For a run that cannot be written, give --results.
    """
    names = method or [AUTO]
    if queries not in QUERIES:
        raise typer.BadParameter(f"{queries!r} is neither {' nor '.join(QUERIES)}.", param_hint="--queries")
    estimators = [None if text == AUTO else parse(text) for text in names]
    by = None if groups is None else _read_groups(groups)
    recorded, paths = opened(run), RunPaths(run, results)
    variant = ("each" if queries == "each" else "") + (f" by {groups.stem}" if groups else "")
    files = {one: paths.scores(_name(one, recorded) or AUTO, variant) for one in dict.fromkeys(estimators)}
    entries, answers = [], []

    def tell(answer: Answer, flipped: tuple[int, ...]) -> None:
        answers.append(answer.scores)
        entries.append({**_facts(answer.scores, answer.file, top, answer.new), **auto.facts(answer.choice)})
        if not as_json:
            _show(answer.scores, answer.file, top, answer.new, flipped)
            if answer.choice is not None:
                auto.show(answer.choice)

    facts = kept(recorded, task)
    there = {} if again or facts is None else _there(files, Asked(facts, queries, by), recorded)
    targets = [*files.values(), *(paths.check(file) for file in files.values())]
    if facts is not None and len(there) == len(files):
        tidy(targets)
        for answer in there.values():
            tell(answer, facts.flipped)
    else:
        subject = subject_of(run, task)
        with working(recorded, ("score", names, budget, queries, by), targets, memory, processes, ray) as resources:
            there = {} if again else _there(files, Asked(read_off(recorded, subject), queries, by), recorded)
            question = Question(recorded, subject.task, subject.query, queries, groups=by, resources=resources)
            for answer in _answers(question, files, there, budget, paths, again=again):
                tell(answer, subject.flipped)
    if as_json:
        print_json({"run": str(run), "scores": entries})
    else:
        step = ("report", run) if set(names) == {AUTO} else _next(answers, run, groups)
        print_next(*step, task, results)


class Answer(NamedTuple):
    """Scores, their file, whether they are new, and how their method was chosen, if it was chosen just now."""

    scores: Scores
    file: Path
    new: bool = False
    choice: Chosen | None = None


def _name(estimator: Estimator | None, run: Run) -> str | None:
    return None if estimator is None else estimator.resolved(run).name


def _there(files: Files, asked: Asked, run: Run) -> dict[Estimator | None, Answer]:
    """Read the answers that are on disk; None stands for the method chosen by measurement."""
    return {
        one: Answer(asked.answered(file, _name(one, run), getattr(one, "ids", None)), file)
        for one, file in files.items()
        if file.exists()
    }


def _answers(
    question: Question,
    files: Files,
    there: dict[Estimator | None, Answer],
    budget: float,
    paths: RunPaths,
    *,
    again: bool,
) -> Iterator[Answer]:
    """Yield the answers: first those on disk, then each new one once it is computed and saved."""
    yield from there.values()
    if None in files and None not in there:
        choice = auto.automatic(question, budget, files[None], paths, again=again)
        yield Answer(choice.scores, files[None], True, choice)
    methods = [one for one in files if one is not None]
    for one, scores in one_by_one(methods, question, [one for one in methods if one in there]):
        yield Answer(scores, scores.save(files[one], overwrite=again), True)


def _next(answers: list[Scores], run: Path, groups: Path | None) -> tuple[str, Path]:
    """Return the next command for the scores: the check, but a few rows cannot be ranked."""
    if all(len(scores.train_ids) < 2 * MINIMUM for scores in answers):
        if all(scores.all_exact for scores in answers):
            return "report", run
        return f"score --method replay{f' --groups {groups}' if groups else ''}", run
    return "verify", run


def _read_groups(file: Path) -> Groups:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_once)
        if not isinstance(raw, dict):
            raise ValueError("no object")
        return raw
    except OSError as error:
        raise InputError(
            f'{file} cannot be read ({error.strerror}): give a JSON file like {{"ann": [0, 3], "bob": [1, 2]}}.',
            code="groups-file-unreadable",
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f'{file} does not hold groups ({error}): write JSON like {{"ann": [0, 3], "bob": [1, 2]}}.',
            code="groups-file-not-groups",
        ) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return dict(pairs)


def _facts(scores: Scores, file: Path, top: int, new: bool) -> dict[str, Any]:
    values = dict(zip(scores.train_ids, scores.mean().tolist(), strict=True))
    return {
        "method": scores.method,
        "precision": scores.precision,
        "file": str(file),
        "new": new,
        "seconds": scores.cost.seconds,
        "hvps": scores.cost.hvps,
        "harmful_count": scores.harmful_count,
        "helpful_count": scores.helpful_count,
        "harmful": [{"id": i, "score": values[i]} for i in scores.harmful(min(top, scores.harmful_count))],
        "helpful": [{"id": i, "score": values[i]} for i in scores.helpful(min(top, scores.helpful_count))],
    }


def _show(scores: Scores, file: Path, top: int, new: bool, flipped: tuple[int, ...]) -> None:
    facts = _facts(scores, file, top, new)
    products = f", {facts['hvps']} Hessian-vector products" if facts["hvps"] else ""
    took = f"{facts['seconds']:.1f} s{products}" if new else "already there"
    how = ", each replayed exactly" if scores.all_exact else ""
    console.print(f"\n[bold]{escape(scores.method)}[/bold]: {scores.harm}{how} ({took}).", highlight=False)
    console.print(f"  {file}", highlight=False, markup=False, soft_wrap=True)
    if scores.mixed:
        console.print(f"  {scores.mixed}", highlight=False)
    for kind in ("harmful", "helpful") if top else ():
        if not facts[f"{kind}_count"]:
            continue
        words = ", ".join(f"{row['id']} ({row['score']:+.2g})" for row in facts[kind])
        few = f" (only {facts[f'{kind}_count']} are)" if facts[f"{kind}_count"] < top else ""
        console.print(f"  most {kind}{few}: {words}", highlight=False, markup=False, soft_wrap=True)
    if flipped and not any(isinstance(i, str) for i in scores.train_ids):
        worst = scores.harmful(min(len(flipped), scores.harmful_count))
        hits = len(set(flipped) & set(worst))
        console.print(
            f"  {hits} of the {len(flipped)} flipped labels are among the {len(worst)} most harmful", highlight=False
        )
