"""Thin commands over the library."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.utils.data import Dataset

from leaveout.demo import Demo, run_demo
from leaveout.errors import LeaveoutError
from leaveout.plan import plan as lo_plan
from leaveout.resources import Resources
from leaveout.store import open_run
from leaveout.task import Task

app = typer.Typer(
    help="Which training examples made your model what it is, and what would it be without them?",
    no_args_is_help=True,
    add_completion=False,
)
console = Console()


def entry() -> None:
    """The command line; what leaveout refuses ends in its one sentence, not in a traceback."""
    try:
        app()
    except LeaveoutError as error:
        Console(stderr=True).print(f"[red]{escape(str(error))}[/red]")
        raise SystemExit(1) from None


@app.callback()
def main() -> None:
    """Which training examples made your model what it is, and what would it be without them?"""


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Keep the recorded run in this new directory.")] = None,
) -> None:
    """Find flipped labels in handwritten digits: train, record, score, verify. Offline, in about a minute."""
    console.print(
        "500 handwritten digits, a tenth of the labels flipped. A small network is trained and recorded; then every "
        "example is scored by what the validation loss would be without it, and the scores are checked by replaying "
        "the run exactly without 64 of the examples.\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        _show(run_demo(out or Path(folder) / "run"))


@app.command()
def plan(
    task: Annotated[str, typer.Option(help="package.module:function that returns (task, query set).")],
    run: Annotated[Path | None, typer.Argument(help="A recorded run; without one, a planned run is described.")] = None,
    epochs: Annotated[int, typer.Option(help="Of the planned run.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Of the planned run.")] = 64,
    lr: Annotated[float, typer.Option(help="Of the planned run, with plain SGD.")] = 0.1,
    memory: Annotated[str, typer.Option(help="Budget of scoring, like 2GB; auto: half of what is free.")] = "auto",
) -> None:
    """Predict time, memory and disk of every method from a few measured steps.

    leaveout plan runs/mnist --task mypackage.mymodule:make_task

    leaveout plan --task mypackage.mymodule:make_task --epochs 20 --batch-size 64
    """
    made, query = _made(task)
    found = lo_plan(
        made,
        query,
        None if run is None else open_run(run),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        epochs=epochs,
        batch_size=batch_size,
        resources=Resources(memory),
    )
    table = Table(title="What every method would need")
    for heading in ("method", "time", "memory", "disk"):
        table.add_column(heading, justify="right")
    for method, needs in found.iterrows():
        disk = f"{needs['disk'] / 1e9:.2f} GB" if needs["disk"] else "-"
        table.add_row(str(method), f"{needs['seconds']:.1f} s", f"{needs['memory'] / 1e9:.2f} GB", disk)
    console.print(table)


def _made(where: str) -> tuple[Task, Dataset]:
    """Calls the user's function; its module is looked for in the working directory as well."""
    module, _, name = where.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        task, query = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise typer.BadParameter(f"{where} gives no (task, query set): {error}") from None
    return task, query


@app.command()
def bench(
    only: Annotated[list[str] | None, typer.Option(help="Only these cases; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Where benchmarks.json and benchmarks.md go.")] = Path("docs"),
) -> None:
    """Measure speed and fidelity as ratios in one run, on the real data sets (LEAVEOUT_DATA)."""
    from leaveout import bench as suite

    unknown = sorted(set(only or ()) - set(suite.CASES))
    if unknown:
        raise typer.BadParameter(f"no case {unknown[0]!r}; there are {', '.join(suite.CASES)}")
    rows = []
    for row in suite.run_cases([case for name, case in suite.CASES.items() if not only or name in only]):
        mark = "[green]meets[/green]" if row.meets else "[red]misses[/red]"
        console.print(f"{row.what}: {row.value:.4g}, {mark} {row.bound} {row.target:.4g} ({row.detail})")
        rows.append(row)
    suite.write(rows, out)


@app.command()
def mnist(
    images: Annotated[int, typer.Option(help="Training images.")] = 50_000,
    flipped: Annotated[float, typer.Option(help="Fraction of labels that are flipped.")] = 0.0,
    replays: Annotated[int, typer.Option(help="Exact replays that the scores are held against.")] = 16,
    out: Annotated[Path, typer.Option(help="Where the figures and the sheet of images go.")] = Path("docs/mnist"),
) -> None:
    """Score every MNIST training image along 20 epochs, and check it by exact replays. Long: see docs/mnist.md."""
    from leaveout.bench.mnist import measure

    told = measure(images, flipped, replays, out)
    console.print_json(data={key: value for key, value in told.items() if key not in ("harmful", "verify")})
    console.print(told["verify"]["sentence"])


def _show(found: Demo) -> None:
    method = list(found.scores)[-1]
    table = Table(title=f"The 15 most harmful examples, by {method}")
    for heading in ("example", "label", "was flipped?", "loss change without it"):
        table.add_column(heading, justify="right")
    values = found.scores[method].to_frame()["mean"]
    for i in found.scores[method].harmful(15):
        number = int(i)
        flipped = f"yes, it is a {found.truth[number]}" if number in found.flipped else "no"
        table.add_row(str(i), str(found.labels[number]), flipped, f"{values[i]:+.5f}")
    console.print(table)
    for name, scores in found.scores.items():
        console.print(
            f"\n[bold]{name}[/bold]: {found.found(name)} of the {len(found.flipped)} flipped labels are among the "
            f"{len(found.flipped)} most harmful examples ({scores.cost.seconds:.1f} s, {scores.cost.hvps} "
            f"Hessian-vector products).\n{found.checks[name]}"
        )
