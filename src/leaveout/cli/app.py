"""The application that the commands join, and what they share: consoles, opening a run, leaving it half done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from leaveout._util.files import LOCK, Lock
from leaveout.compute.engines import Engine, Local, Ray
from leaveout.compute.resources import Resources
from leaveout.errors import RunError, closest
from leaveout.run.manifest import MANIFEST, cut_short
from leaveout.run.paths import Beside
from leaveout.run.reader import Run, open_run

INTERRUPTED = 130
SHARD = 256
"""Rows that are finished, and kept, together."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    epilog="Exit codes: 0 all went well, 1 refused (the reason and the remedy are on stderr), 2 the command line is "
    "wrong, 130 interrupted by Ctrl-C; what was finished is kept.",
)
console = Console()
complaints = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a machine to read, and nothing else.")]

MemoryOption = Annotated[str, typer.Option("--memory", help="Budget, like 2GB; auto: half of what is free.")]
ProcessesOption = Annotated[int, typer.Option("--processes", help="Processes on this machine that share the work.")]
ResultsOption = Annotated[
    Path | None,
    typer.Option("--results", help="Directory for scores, checks, curve and page, instead of the run's own."),
]
RayOption = Annotated[
    str | None, typer.Option("--ray", help="Work on a Ray cluster: its address, or auto for RAY_ADDRESS or a new one.")
]


@app.callback(invoke_without_command=True)
def main(told: Annotated[bool, typer.Option("--version", help="Say which version this is.")] = False) -> None:
    """Which training examples made your model what it is, and what would it be without them?

    The way through, on data that need no network:

    [dim]$[/dim] leaveout train --data digits --flip 0.1 --hidden 16 --activation tanh --out runs/digits

    [dim]$[/dim] leaveout score runs/digits --method acc --method sgd-ie

    [dim]$[/dim] leaveout verify runs/digits

    [dim]$[/dim] leaveout cleanse runs/digits

    [dim]$[/dim] leaveout report runs/digits

    Your own model: record it with lo.Recorder, then name a function that returns (task, query set):

    [dim]$[/dim] leaveout score runs/mine --task mypackage.mymodule:make_task
    """
    if told:
        typer.echo(f"leaveout {version('leaveout')}")
        raise typer.Exit


def opened(path: Path, *, partial: bool = False) -> Run:
    """The run in a directory; where there is none, one with a similar name is suggested."""
    if not (path / MANIFEST).exists() and path.parent.is_dir():
        near = [str(folder) for folder in sorted(path.parent.iterdir()) if (folder / MANIFEST).exists()]
        if suggestion := closest(str(path), near):
            raise RunError(f"{path} holds no run{suggestion}.")
    if not partial and Beside(path).config.exists() and cut_short(path):
        raise RunError(
            f"The run in {path} was cut short: give the leaveout train command that began it again, and it goes on."
        )
    return open_run(path, partial=partial)


def engine_of(processes: int, ray: str | None) -> Engine:
    """The engine that the options name."""
    if ray is not None and processes != 1:
        raise typer.BadParameter("--processes are on this machine, --ray is a cluster: give one of them.")
    if processes > 1:  # they share the cores: workers take as many threads as this process has
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    return Local(processes) if ray is None else Ray(None if ray == "auto" else ray)


@contextmanager
def working(
    work: Path, targets: Iterable[Path], memory: str, processes: int = 1, ray: str | None = None
) -> Iterator[Resources]:
    """Resources that keep finished shards in ``work`` until all is done, so that a crash loses only what is under way.

    No other command writes the ``targets`` meanwhile. Ctrl-C within ends in a sentence that says how to go on.
    """
    engine = engine_of(processes, ray)
    with _claimed(work.parent, targets):
        with resumable("What was finished is kept; the same command goes on from there."):
            yield Resources(memory, engine=engine, work=work, shard=SHARD)
        shutil.rmtree(work, ignore_errors=True)
    with suppress(OSError):  # others are at work there
        work.parent.rmdir()


@contextmanager
def _claimed(folder: Path, targets: Iterable[Path]) -> Iterator[None]:
    """Holds a lock for each file that will be written: who comes second is told before the work, not after it."""
    with ExitStack() as held:
        for target in sorted(set(targets)):
            place = folder / f"{target.name}.lock"
            try:
                place.mkdir(parents=True, exist_ok=True)
                lock = Lock(place)
            except RunError:
                raise RunError(
                    f"{target} is being written by another leaveout command ({_holder(place)}): wait until that has "
                    "ended, or stop it and give the same command again."
                ) from None
            except OSError as error:
                raise RunError(
                    f"Nothing can be written in {folder.parent} ({error.strerror or error}): give --results DIRECTORY "
                    "to put the results elsewhere, or make room."
                ) from None
            held.callback(_remove, place)
            held.callback(lock.release)
        yield


def _remove(place: Path) -> None:
    with suppress(OSError):  # another command has its lock there by now
        place.rmdir()


def _holder(place: Path) -> str:
    try:
        return f"process {int((place / LOCK).read_text()[:32])}"
    except (OSError, ValueError):
        return "of another process"


def print_next(command: str, run: Path, task: str | None, results: Path | None = None) -> None:
    """What one would do now, ready to be copied."""
    more = (f" --task {task}" if task else "") + (f" --results {results}" if results else "")
    console.print(f"\nNext: leaveout {command} {run}{more}", highlight=False, markup=False, soft_wrap=True)


def print_json(told: Any) -> None:
    """JSON on stdout, not wrapped to any width."""
    typer.echo(json.dumps(told, indent=1))


@contextmanager
def resumable(how: str) -> Iterator[None]:
    """Ctrl-C within ends in a sentence that says how to go on, and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        complaints.print(f"\nInterrupted. {how}", style="yellow", markup=False)
        raise typer.Exit(INTERRUPTED) from None
