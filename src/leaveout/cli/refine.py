"""leaveout refine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaveout._util.leftovers import tidy
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
from leaveout.cli.auto import AUTO
from leaveout.cli.commands import app
from leaveout.cli.subject import TaskOption, subject_of
from leaveout.cli.verify import chosen
from leaveout.errors import InputError
from leaveout.evaluate.refine import refine as lo_refine
from leaveout.run.paths import RunPaths
from leaveout.scores import Scores

REPLAY = " + Replay"


@app.command()
def refine(
    run: Annotated[Path, typer.Argument(help="A recorded run that was scored.")],
    method: Annotated[str | None, typer.Option(help="Whose scores; the newest by default.")] = None,
    task: TaskOption = None,
    top: Annotated[int, typer.Option(help="How many of the most extreme scores to replace by exact replays.")] = 32,
    again: Annotated[bool, typer.Option("--again", help="Replace refined scores that are there already.")] = False,
    memory: MemoryOption = "auto",
    processes: ProcessesOption = 1,
    ray: RayOption = None,
    results: ResultsOption = None,
    as_json: AsJson = False,
) -> None:
    """Replace the most extreme scores by exact leave-one-out replays.

    [dim]$[/dim] leaveout refine runs/digits

    [dim]$[/dim] leaveout refine runs/digits --method acc --top 100

    Half of the replays go to the most harmful, half to the most helpful. The refined scores go to runs/x/scores.
    """
    recorded, paths = opened(run), RunPaths(run, results)
    scores = _plain(chosen(recorded, paths, [method] if method else None), run)
    variant = "each" if scores.queries == "each" else ""
    out = paths.scores(scores.method.removesuffix(REPLAY) + REPLAY, variant)
    if out.exists() and not again:
        refined = _answering(out, scores, top)
        tidy([out])
    else:
        subject = subject_of(run, task)
        with working(recorded, ("refine", out, top), [out], memory, processes, ray) as resources:
            refined = lo_refine(scores, recorded, subject.task, subject.query, top=top, resources=resources)
            refined.save(out, overwrite=again)
    exact = int(refined.exact.sum()) if refined.exact is not None else 0
    if as_json:
        print_json({"run": str(run), "file": str(out), "method": refined.method, "exact": exact})
        return
    values = dict(zip(refined.train_ids, refined.mean().tolist(), strict=True))
    harmful = ", ".join(f"{i} ({values[i]:+.2g})" for i in refined.harmful(min(10, refined.harmful_count)))
    count = f"{exact} of {len(refined.train_ids)} scores are exact now, the {min(top, exact)} most extreme among them"
    console.print(f"{refined.method}: {count}.", highlight=False, markup=False)
    console.print(f"  most harmful: {harmful}\n  {out}", highlight=False, markup=False, soft_wrap=True)
    print_next("report", run, task, results)


def _plain(files: list[Path], run: Path) -> Scores:
    """Return the newest scores that are estimates of a change of the loss, or chosen ones that are partly exact."""
    estimates = [
        scores
        for file in sorted(files, key=lambda one: one.stat().st_mtime)
        if (scores := Scores.load(file)).is_effect
        and not scores.all_exact
        and (not scores.method.endswith(REPLAY) or file.stem.partition("-")[0] == AUTO)
    ]
    if not estimates:
        raise InputError(
            f"{run} has no estimates to refine: the scores that are there are exact already, or are not changes of "
            f"the loss. Look at them with leaveout report {run}, or estimate with leaveout score {run} --method acc.",
            code="nothing-to-refine",
        )
    return estimates[-1]


def _answering(file: Path, scores: Scores, top: int) -> Scores:
    """Return the refined scores in a file, if they belong to these scores and to the same number of replays."""
    refined = Scores.load(file)
    before = set() if scores.exact is None else set(scores.exact.nonzero().flatten().tolist())
    rows = before | set(scores.extreme(top))
    exact = set() if refined.exact is None else set(refined.exact.nonzero().flatten().tolist())
    same = [row for row in range(len(scores.train_ids)) if row not in exact]
    if (
        refined.train_ids != scores.train_ids
        or exact != rows
        or not refined.values[same].equal(scores.values[same])
        or refined.run_fingerprint != scores.run_fingerprint
    ):
        raise InputError(
            f"{file} is of other scores or other replays: give --again to replace it.", code="refined-in-the-way"
        )
    return refined
