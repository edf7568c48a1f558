"""Shared parts of the commands: consoles, options, opening a run, resuming interrupted work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from leaveout.errors import RunError
from leaveout.run.paths import RunPaths

if TYPE_CHECKING:
    from leaveout.compute.engines import Engine
    from leaveout.compute.resources import Resources
    from leaveout.run.reader import Run

INTERRUPTED = 130
SHARD = 256
"""The number of rows per stored shard."""

console = Console()
complaints = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a machine to read, and nothing else.")]

MemoryOption = Annotated[str, typer.Option("--memory", help="Budget, like 2GB; auto: half of what is free.")]
ProcessesOption = Annotated[
    int, typer.Option("--processes", min=1, help="Processes on this machine that share the work.")
]
ResultsOption = Annotated[
    Path | None,
    typer.Option("--results", help="Directory for scores, checks, curve and page, instead of the run's own."),
]
RayOption = Annotated[
    str | None, typer.Option("--ray", help="Work on a Ray cluster: its address, or auto for RAY_ADDRESS or a new one.")
]


def opened(path: Path, *, partial: bool = False) -> Run:
    """Open the run in a directory; if there is none, suggest one with a similar name."""
    from leaveout.run.manifest import MANIFEST, cut_short
    from leaveout.run.reader import open_run

    if not (path / MANIFEST).exists() and path.parent.is_dir():
        near = [folder.name for folder in sorted(path.parent.iterdir()) if (folder / MANIFEST).exists()]
        likely = near[0] if len(near) == 1 else next(iter(get_close_matches(path.name, near, 1)), None)
        if near:
            hint = f"did you mean {path.parent / likely}?" if likely else f"there are {', '.join(near[:8])}"
            raise RunError(f"{path} does not hold a run ({hint}).", code="run-not-found")
    if not partial and RunPaths(path).config.exists() and cut_short(path):
        raise RunError(
            f"The run in {path} was cut short: repeat the leaveout train command that started it; it continues.",
            code="run-cut-short",
        )
    return open_run(path, partial=partial)


def engine_of(processes: int, ray: str | None) -> Engine:
    """Return the engine that the options name."""
    import torch

    from leaveout.compute.engines import Local, Ray

    if ray is not None and processes != 1:
        raise typer.BadParameter("--processes are on this machine, --ray is a cluster: give one of them.")
    if processes > 1:  # they share the cores: workers use as many threads as this process
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    return Local(processes) if ray is None else Ray(None if ray == "auto" else ray)


@contextmanager
def working(
    run: Run, question: tuple, targets: Iterable[Path], memory: str, processes: int = 1, ray: str | None = None
) -> Iterator[Resources]:
    """Store finished shards of a question until it is answered: a crash loses only unfinished shards.

    No other command writes the ``targets`` meanwhile. Ctrl-C ends with a sentence that says how to continue.
    """
    from leaveout.compute.jobs import cached_work
    from leaveout.compute.resources import Resources

    work = cached_work(run.fingerprint, *question)
    engine = engine_of(processes, ray)
    with claimed(targets):
        with resumable("What was finished is kept; the same command continues from there."):
            yield Resources(memory, engine=engine, work=work, shard=SHARD)
        shutil.rmtree(work, ignore_errors=True)
    with suppress(OSError):  # other work is stored there
        work.parent.rmdir()


@contextmanager
def claimed(targets: Iterable[Path]) -> Iterator[None]:
    """Hold a lock beside each file that will be written: a second command is refused before the work, not after it."""
    from leaveout._util.leftovers import place_of_lock, remove_asides
    from leaveout._util.lock import Lock

    with ExitStack() as stack:
        for target in sorted(set(targets)):
            place = place_of_lock(target)
            try:
                place.mkdir(parents=True, exist_ok=True)
                lock = Lock(place)
                remove_asides(target)
            except RunError:
                raise RunError(
                    f"{target} is being written by another leaveout command ({_holder(place)}): wait until that has "
                    "ended, or stop it and give the same command again.",
                    code="directory-busy",
                ) from None
            except OSError as error:
                raise RunError(
                    f"Nothing can be written in {target.parent} ({error.strerror or error}): give --results DIRECTORY "
                    "to put the results elsewhere, or make room.",
                    code="file-not-writable",
                ) from None
            stack.callback(_remove, place)
            stack.callback(lock.release)
        yield


def _remove(place: Path) -> None:
    with suppress(OSError):  # another command holds its lock there by now
        place.rmdir()
        place.parent.rmdir()  # created for the lock, if nothing was written


def _holder(place: Path) -> str:
    from leaveout._util.lock import LOCK

    try:
        return f"process {int((place / LOCK).read_text()[:32])}"
    except (OSError, ValueError):
        return "of another process"


def print_next(command: str, run: Path, task: str | None, results: Path | None = None) -> None:
    """Print the next command to run, ready to be copied."""
    words = f"\nNext: leaveout {command} {run}{repeated(task, results)}"
    console.print(words, highlight=False, markup=False, soft_wrap=True)


def repeated(task: str | None, results: Path | None) -> str:
    """Write the options that the next command needs too.

    >>> repeated("mymodule:make_task", None), repeated(None, None)
    (' --task mymodule:make_task', '')
    """
    return (f" --task {task}" if task else "") + (f" --results {results}" if results else "")


def print_json(content: Any) -> None:
    """Print JSON to stdout, without line wrapping."""
    typer.echo(json.dumps(content, indent=1))


@contextmanager
def resumable(how: str | Callable[[], str]) -> Iterator[None]:
    """End with exit code 130 after Ctrl-C in this context, with a sentence that says how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        sentence = how if isinstance(how, str) else how()
        complaints.print(f"\nInterrupted. {sentence}", style="yellow", markup=False)
        raise typer.Exit(INTERRUPTED) from None
