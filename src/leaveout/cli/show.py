"""leaveout show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from leaveout.cli.app import AsJson, ResultsOption, complaints, console, opened, print_json, print_next
from leaveout.cli.commands import app
from leaveout.errors import LeaveoutError
from leaveout.evaluate.check import Check
from leaveout.evaluate.curve import Curve
from leaveout.evaluate.label_issues import Labels
from leaveout.run.checking import check_run
from leaveout.run.manifest import INITIAL, MANIFEST
from leaveout.run.paths import RunPaths
from leaveout.run.reader import Run
from leaveout.scores import Scores


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="The directory of a run, also of one that was cut short.")],
    check: Annotated[bool, typer.Option("--check", help="Read every byte and name every damaged file.")] = False,
    results: ResultsOption = None,
    as_json: AsJson = False,
) -> None:
    """Say what a run holds: what was trained, how long, how many states are kept, and which scores it has.

    [dim]$[/dim] leaveout show runs/digits

    [dim]$[/dim] leaveout show runs/digits --check

    With --check the exit code is 1 if a file is damaged, or is of another run.
    """
    damage = check_run(run) if check else []
    recorded = None if damage else opened(run, partial=True)
    facts = {} if recorded is None else _facts(recorded)
    lists = _results(RunPaths(run, results), recorded)
    if check:
        damage += [entry["problem"] for part in lists.values() for entry in part if "problem" in entry]
    facts |= lists if facts else {}
    if as_json:
        print_json({"run": str(run), **facts, **({"damage": damage} if check else {})})
    else:
        _print(facts, run)
        for sentence in damage:
            complaints.print(sentence, style="red", markup=False, soft_wrap=True)
        if check and not damage:
            console.print("Every file is as it was written.")
        paths = RunPaths(run, results)
        if step := _next(facts, paths) if facts and paths.config.exists() else None:
            print_next(step, run, None, results)
    if damage:
        raise typer.Exit(1)


def _next(facts: dict[str, Any], paths: RunPaths) -> str | None:
    """Name the first command of the usual sequence that has not been run yet."""
    if not facts["finished"]:
        return None
    taken = {"labels": facts["labels"], "score": facts["scores"], "report": paths.report.exists()}
    return next((step for step, there in taken.items() if not there), None)


def _facts(run: Run) -> dict[str, Any]:
    manifest, rule = run.manifest, run.rule
    first, last = run.record(0), run.record(len(run) - 1)
    sizes = dict.fromkeys(manifest.shapes, 1)
    for name, shape in manifest.shapes.items():
        for width in shape:
            sizes[name] *= width
    files = [run.path / name for name in (MANIFEST, INITIAL, *(shard.name for shard in manifest.shards))]
    return {
        "finished": manifest.finished,
        "parameters": sum(sizes.values()),
        "tensors": {name: manifest.shapes[name] for name in rule.groups},
        "dtypes": sorted(set(manifest.dtypes.values())),
        "optimizer": rule.kind,
        "first_step": first.hypers,
        "last_step": last.hypers,
        "steps": len(run),
        "epochs": last.epoch + 1,
        "batch_size": len(first.ids),
        "train_size": manifest.train_size
        or len({i for step in range(len(run)) for i in run.record(step).ids.tolist()}),
        "states_kept": len(run.kept),
        "disk": sum(file.stat().st_size for file in files),
    }


def _examples(run: Run) -> set[int]:
    """Return the examples that some step used."""
    return {i for step in range(len(run)) for i in run.record(step).ids.tolist()}


def _results(paths: RunPaths, run: Run | None) -> dict[str, list[dict[str, Any]]]:
    """List the results beside a run, each with its content or its problem, such as belonging to another run.

    With a damaged run (None), results are not compared with it.
    """
    return {
        "scores": [_result(file, run, Scores.load, _scores) for file in paths.scored()],
        "checks": [_result(file, run, partial(_check, paths), _sentence) for file in paths.checked()],
        "labels": [_result(file, run, Labels.load, _sentence) for file in [paths.labels] if file.exists()],
        "curves": [_result(file, run, Curve.load, _sentence) for file in [paths.cleanse] if file.exists()],
    }


def _result(
    file: Path, run: Run | None, load: Callable[[Path], Any], facts: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    try:
        result = load(file)
        if run is not None:
            result.check_same_run(run)
        return {"file": str(file), **facts(result)}
    except LeaveoutError as error:
        problem = str(error) if str(file) in str(error) else f"{file}: {error}"
        return {"file": str(file), "problem": problem}


def _scores(scores: Scores) -> dict[str, Any]:
    return {"method": scores.method, "rows": len(scores.train_ids), "queries": len(scores.query_ids)}


def _check(paths: RunPaths, file: Path) -> Check:
    """Read a check, and compare it with the scores of the same name."""
    check = Check.load(file)
    for scores in paths.scored():
        if scores.stem == file.stem:
            check.check_same_scores(Scores.load(scores))
    return check


def _sentence(result: Check | Curve | Labels) -> dict[str, Any]:
    first, *more = str(result).splitlines()
    return {"sentence": f"{first} ({len(more)} more lines: leaveout cleanse)" if more else first}


def _print(facts: dict[str, Any], run: Path) -> None:
    if not facts:
        return
    table = Table(title=Text(str(run), "table.title"), show_header=False)
    steps = f"{facts['steps']}, {'finished' if facts['finished'] else 'cut short: the rest was not recorded'}"
    rows = {
        "model": f"{facts['parameters']:,} parameters in {len(facts['tensors'])} tensors, {', '.join(facts['dtypes'])}",
        "optimizer": f"{facts['optimizer']}; first step {_hypers(facts['first_step'])}",
        "last step": _hypers(facts["last_step"]),
        "steps": steps,
        "epochs": str(facts["epochs"]),
        "batches": f"of {facts['batch_size']}"
        + (f" from {facts['train_size']} examples" if facts["train_size"] else ""),
        "states kept": f"{facts['states_kept']} of {facts['steps'] + 1}",
        "disk": f"{facts['disk'] / 1e6:.2f} MB",
    }
    for name, words in rows.items():
        table.add_row(name, words)
    for entry in facts["scores"]:
        kind = f"{entry['method']}, {entry['rows']} x {entry['queries']}" if "method" in entry else entry["problem"]
        table.add_row("scores", kind)
    for kind, part in (("check", "checks"), ("labels", "labels"), ("cleansing", "curves")):
        for entry in facts[part]:
            table.add_row(kind, entry.get("sentence") or entry["problem"])
    console.print(table, markup=False)  # names in files from others are not markup


def _hypers(groups: list[dict[str, float]]) -> str:
    """Write the hyperparameters that are not zero, one group after the other."""
    phrases = [
        ", ".join(f"{name} {value:g}" for name, value in group.items() if value and name not in ("started", "step"))
        for group in groups
    ]
    return " | ".join(dict.fromkeys(phrases))
