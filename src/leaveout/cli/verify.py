"""leaveout verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

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
from leaveout.cli.auto import is_of_the_choice
from leaveout.cli.commands import app
from leaveout.cli.methods import parse
from leaveout.cli.subject import TaskOption, later
from leaveout.cli.wording import in_commands
from leaveout.errors import InputError, LeaveoutError, closest
from leaveout.estimators.replay import JITTER
from leaveout.evaluate.check import EXACT, MINIMUM, Check
from leaveout.evaluate.selection import in_turns
from leaveout.evaluate.verdict import Verdict
from leaveout.evaluate.verify import BUDGET, comparable
from leaveout.evaluate.verify import chosen as sample
from leaveout.evaluate.verify import verify as lo_verify
from leaveout.reporting.trust import verdict_of
from leaveout.run.paths import RunPaths, slug
from leaveout.run.reader import Run
from leaveout.scores import Scores


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="A recorded run that was scored.")],
    method: Annotated[list[str] | None, typer.Option(help="Only these scores; may be repeated.")] = None,
    task: TaskOption = None,
    replays: Annotated[int, typer.Option(min=2 * MINIMUM, help="How many examples to leave out exactly.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the random half of them, and of the moves.")] = 0,
    budget: Annotated[
        float, typer.Option(min=0, help="Seconds of processor time for all of it; what does not fit is said.")
    ] = BUDGET,
    moves: Annotated[
        int | None,
        typer.Option(
            help="Moved starts to replay from as well; by default two where scores disagree with replays or are exact."
        ),
    ] = None,
    jitter: Annotated[float, typer.Option(help="Size of a move, relative to the start's.")] = JITTER,
    again: Annotated[bool, typer.Option("--again", help="Replace checks that are there already.")] = False,
    memory: MemoryOption = "auto",
    processes: ProcessesOption = 1,
    ray: RayOption = None,
    results: ResultsOption = None,
    as_json: AsJson = False,
) -> None:
    """Compare scores with exact leave-one-out replays: can they be trusted?

    [dim]$[/dim] leaveout verify runs/digits

    [dim]$[/dim] leaveout verify runs/digits --method acc --replays 128

    [dim]$[/dim] leaveout verify runs/mine --task mypackage.mymodule:make_task --json

    [dim]$[/dim] leaveout verify runs/digits --moves 2

    Half of the replays go to the most extreme examples, half to a random sample. Checks go to runs/x/checks. Where
    scores and replays disagree, replays from slightly moved starts tell wrong scores from a training in which single
    examples have no reproducible effect; each move costs as much as the replays, and --moves 0 leaves them out. Scores
    that are exact replays are only asked that: are their effects reproducible?
    """
    recorded, paths = opened(run), RunPaths(run, results)
    files = chosen(recorded, paths, method)
    entries, few, exact, checks = [], [], [], []
    targets = [paths.check(file) for file in files]
    question = ("verify", files, replays, seed, moves, jitter)
    subject = later(run, task)
    share = budget / len(files)
    with working(recorded, question, targets, memory, processes, ray) as resources:
        for file in files:
            scores, out = Scores.load(file), paths.check(file)
            short = len(comparable(scores)) < 2 * MINIMUM
            if scores.all_exact:
                exact.append(scores.method)
                if method is None and (short or moves == 0):
                    continue
            if method is None and short:
                few.append({"file": str(file), "method": scores.method, "rows": len(comparable(scores))})
                continue  # if requested by name, they are refused
            there = _answering(out, scores, replays, seed, moves, share) if out.exists() and not again else None
            check = there or lo_verify(
                *(scores, recorded, subject().task, subject().query),
                replays=replays,
                seed=seed,
                budget=share,
                moves=moves,
                jitter=jitter,
                resources=resources,
            )
            if there is None:
                check.save(out, overwrite=True)
            entries.append({"file": str(out), **json.loads(out.read_text())})
            checks.append((check, scores))
    if as_json:
        print_json({"run": str(run), "checks": entries, "too_few": few, "exact": exact})
        return
    if checks:
        _print([check for check, _ in checks], [one["file"] for one in entries])
    for name in set(exact) - {check.method for check, _ in checks}:
        console.print(f"{name}: {EXACT}", highlight=False, markup=False)
    for one in few:
        console.print(f"\n{_too_few(one, run)}", highlight=False, markup=False, soft_wrap=True)
    advice, command = _advice(checks)
    if advice:
        console.print(f"\n{advice}", highlight=False, markup=False)
    print_next(command, run, task, results)


def _print(checks: list[Check], files: list[str]) -> None:
    estimates = [check for check in checks if not check.exact]
    for check in estimates:
        trust = verdict_of(check)
        words = f"{check.method}: {trust.headline[0].lower()}{trust.headline[1:]}. {trust.brief}"
        console.print(words, highlight=False, markup=False)
    if estimates:
        console.print(_table(estimates))
    for check in checks:
        more = " ".join(part for part in (check.diagnosis, check.omitted) if part)
        words = check.sentence if check.exact else f"{check.method}: {more}" if more else ""
        if words:
            console.print(in_commands(words), highlight=False, markup=False)
    for file in files:
        console.print(f"  {file}", highlight=False, markup=False, soft_wrap=True)


def _table(checks: list[Check]) -> Table:
    """Build a table with a row per method: the verdict, and rank correlation and error in both samples."""
    table = Table("method", "verdict", title=f"Compared with {len(checks[0].table)} exact replays")
    for heading in ("tau, most extreme", "tau, at random", "typical error"):
        table.add_column(heading, justify="right")
    for check in checks:
        parts = {"extreme": check.extreme, "random": check.random}
        errors = [
            f"{part.rmse.value / check.spread[name]:.0%}" for name, part in parts.items() if check.spread[name] > 0
        ]
        taus = [str(part.kendall) if check.verdict is not Verdict.FEW else "-" for part in parts.values()]
        table.add_row(Text(check.method), check.short, *taus, ", ".join(errors) or "-")
    table.caption = (
        "tau: rank correlation with the truth (95% interval); typical error: as a share of the truth's spread"
    )
    return table


def _advice(checks: list[tuple[Check, Scores]]) -> tuple[str, str]:
    """Say what to do next: with scores that can be trusted, the report; with weak ones, something more exact."""
    if not checks:
        return "", "report"
    exact = [check for check, _ in checks if check.exact]
    if exact:
        vain = all(check.ceiling is not None and not check.ceiling.largest for check in exact)
        return ("The labels do not depend on such effects.", "labels") if vain else ("", "report")
    if all(check.too_few for check, _ in checks):
        more = max(64, 2 * max(len(check.table) for check, _ in checks))
        return "These replays are too few to tell.", f"verify --again --replays {more}"
    verdict = min((check.verdict for check, _ in checks), key=list(Verdict).index)
    if verdict in (Verdict.GOOD, Verdict.COARSE):
        return "", "report"
    comparable = [check for check, scores in checks if scores.is_effect]
    if not comparable:
        return f"By these scores {verdict.value}: score with a method that gives changes of the loss.", "score"
    ceilings = [check.ceiling for check in comparable if check.ceiling is not None]
    if ceilings and not any(ceiling.largest for ceiling in ceilings):
        return "Exact replays would answer for the last digits of this run alone: look at its labels.", "labels"
    if ceilings and not any(ceiling.reproducible for ceiling in ceilings):
        return "What is reproducible are the most extreme effects: refine makes them exact.", "refine"
    return (
        f"By these scores {verdict.value}: refine replaces the most extreme ones by exact replays; or replay every "
        "example (score --method replay), if leaveout plan says that you can afford it.",
        "refine",
    )


def _too_few(scores: dict[str, Any], run: Path) -> str:
    return (
        f"{scores['method']}: {scores['rows']} rows are too few to rank (it takes {2 * MINIMUM}), so they were not "
        f"verified. Exact values to compare them with: leaveout score {run} --method replay, for groups with the same "
        f"--groups.\n  {scores['file']}"
    )


def _answering(file: Path, scores: Scores, replays: int, seed: int, moves: int | None, budget: float) -> Check | None:
    """Return the check in a file, if it belongs to these scores and to the requested sample; None to do it anew."""
    check = Check.load(file)
    if is_of_the_choice(check, scores) and not moves:
        return check
    if check.omitted and budget > check.budget:
        return None  # now there is more time
    rows = [row for row, _ in in_turns(*sample(scores, replays, seed))][: len(check.table) if check.omitted else None]
    expected = {scores.train_ids[row]: value for row, value in zip(rows, scores.mean()[rows].tolist(), strict=True)}
    moved = 0 if check.ceiling is None else check.ceiling.moves
    if expected != dict(check.table["score"]) or (moves not in (None, moved) and not check.omitted):
        raise InputError(
            f"{file} is of other scores or other replays: give --again to replace it.", code="check-in-the-way"
        )
    return check


def chosen(run: Run, paths: RunPaths, methods: list[str] | None) -> list[Path]:
    """Return the files of these methods' scores beside a run, or all of them; named by the method or by the file."""
    scored = {file.stem: file for file in paths.scored()}
    if not scored:
        raise InputError(f"{run.path} has no scores yet: run leaveout score {run.path} first.", code="scores-missing")
    if methods is None:
        return list(scored.values())
    return [scored[_stem(run, method, scored)] for method in methods]


def _stem(run: Run, method: str, scored: dict[str, Path]) -> str:
    if slug(method) in scored:
        return slug(method)
    try:
        name = slug(parse(method).resolved(run).name)
    except LeaveoutError as error:
        raise InputError(
            f"{run.path} has no scores of {method!r}{closest(slug(method), scored)}: there are {', '.join(scored)}. "
            f"Nor is it a method: {error}",
            code="method-unknown",
        ) from None
    if name not in scored:
        raise InputError(
            f"{run.path} has no scores of {method!r}{closest(name, scored)}: there are {', '.join(scored)}; "
            f"or run leaveout score {run.path} --method {method!r} first.",
            code="scores-missing",
        )
    return name
