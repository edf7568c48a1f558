"""The commands of the project itself, from a checkout: ``python -m experiments reproduce|bench|mnist|load``."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from leaveout import cli
from leaveout.cli.app import ProcessesOption, RayOption, console, engine_of
from leaveout.compute.resources import Resources
from leaveout.errors import closest

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")


@app.command()
def reproduce(
    what: Annotated[str, typer.Argument(help="Which experiment; 'all' for every one, 'list' to see them.")],
    seeds: Annotated[int | None, typer.Option(help="How many seeds; the experiment's own number by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small version, in minutes.")] = False,
    out: Annotated[Path, typer.Option(help="The directory of all results.")] = Path("docs/results"),
    report_only: Annotated[bool, typer.Option("--report-only", help="Tables and plots of the finished cells.")] = False,
    part: Annotated[str, typer.Option(help="Share the cells between processes: 1/2 here, 2/2 there.")] = "1/1",
    processes: ProcessesOption = 1,
    ray: RayOption = None,
) -> None:
    """Reproduce the published tables and curves. Stop it at any time: finished cells are not computed again.

    [dim]$[/dim] python -m experiments reproduce list

    [dim]$[/dim] python -m experiments reproduce convex --quick --out results

    [dim]$[/dim] python -m experiments reproduce nonconvex --seeds 3 --processes 2 --out results
    """
    from experiments.reproduce import SPECS, report, runner

    if what == "list":
        for spec in SPECS.values():
            console.print(f"[bold]{spec.name}[/bold]: {spec.title} ({spec.seeds} seeds)")
        return
    if what != "all" and what not in SPECS:
        raise typer.BadParameter(
            f"no experiment {what!r}{closest(what, SPECS)}; there are {', '.join(SPECS)} and 'all'"
        )
    shared = re.fullmatch(r"([0-9]+)/([0-9]+)", part)
    if not shared:
        raise typer.BadParameter(f"--part {part!r} is not like 1/2")
    report.check_extras()
    resources = Resources(engine=engine_of(processes, ray))
    for spec in SPECS.values() if what == "all" else [SPECS[what]]:
        if not report_only:
            share = (int(shared[1]), int(shared[2]))
            count = runner.compute(spec, out, seeds, quick=quick, part=share, resources=resources)
            console.print(f"{spec.name}: {count} cells computed")
        console.print(f"{spec.name}: {report.write(spec, out, seeds, quick=quick)}", markup=False)
    console.print(f"plots: {report.page(SPECS.values(), out, seeds, quick=quick)}", markup=False)


@app.command()
def bench(
    only: Annotated[list[str] | None, typer.Option(help="Only these cases; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Where benchmarks.json and benchmarks.md go.")] = Path("docs"),
    processor: Annotated[
        bool, typer.Option("--processor-time", help="Measure processor time: for a machine that has other work.")
    ] = False,
) -> None:
    """Measure speed and fidelity as ratios in one run, on the real data sets (LEAVEOUT_DATA).

    [dim]$[/dim] python -m experiments bench

    [dim]$[/dim] python -m experiments bench --only image_sweeps --only replays --out benchmarks
    """
    from experiments import bench as suite

    unknown = sorted(set(only or ()) - set(suite.CASES))
    if unknown:
        raise typer.BadParameter(f"no case {unknown[0]!r}; there are {', '.join(suite.CASES)}")
    if processor:
        suite.CLOCKS.append(time.process_time)
    for row in suite.run_cases([case for name, case in suite.CASES.items() if not only or name in only]):
        row = (
            replace(row, detail=f"{row.detail}; processor time, threads: {torch.get_num_threads()}")
            if processor
            else row
        )
        mark = "[green]meets[/green]" if row.meets else "[red]misses[/red]"
        console.print(f"{row.what}: {row.value:.4g}, {mark} {row.bound} {row.target:.4g} ({row.detail})")
        suite.write([row], out)


@app.command()
def mnist(
    images: Annotated[int, typer.Option(help="Training images.")] = 50_000,
    flipped: Annotated[float, typer.Option(help="Fraction of labels that are flipped.")] = 0.0,
    replays: Annotated[int, typer.Option(help="Exact replays that the scores are compared with.")] = 16,
    moves: Annotated[
        int, typer.Option(min=0, help="Moved starts to replay from as well: do single images have an effect?")
    ] = 0,
    groups: Annotated[
        bool,
        typer.Option(help="With moves: look from what group size on there is an effect, if single images have none."),
    ] = True,
    out: Annotated[Path, typer.Option(help="Where the figures and the sheet of images go.")] = Path("docs/mnist"),
    work: Annotated[
        Path | None, typer.Option(help="Where run, scores and finished replays stay; the same command continues.")
    ] = None,
) -> None:
    """Score every MNIST training image along 20 epochs, and check it by exact replays. Long: see docs/mnist.md.

    [dim]$[/dim] python -m experiments mnist --images 5000 --flipped 0.1 --replays 64 --work runs/mnist

    [dim]$[/dim] python -m experiments mnist --images 5000 --flipped 0.1 --replays 32 --moves 2 --work runs/mnist

    Each move takes as long as the replays. Where single images have no reproducible effect, random groups of growing
    size are replayed as well, 48 replays for each size; --no-groups leaves them out.
    """
    from experiments.bench.mnist import CHECKS, measure

    figures = measure(images, flipped, replays, out, work, moves, groups)
    long = ("harmful", *CHECKS)
    console.print_json(data={key: value for key, value in figures.items() if key not in long})
    console.print(figures[CHECKS[moves > 0]]["sentence"])


@app.command()
def load(
    steps: Annotated[int, typer.Option(help="Steps of the long run.")] = 1_000_000,
    examples: Annotated[int, typer.Option(help="Examples of the wide run.")] = 1_000_000,
    only: Annotated[Literal["wide", "long"] | None, typer.Option(help="One of the two; the other's rows stay.")] = None,
    out: Annotated[Path, typer.Option(help="Where load.json and load.md go.")] = Path("docs"),
) -> None:
    """Record very many steps, score very many examples, and watch the memory. Long: see docs/load.md.

    [dim]$[/dim] python -m experiments load --only wide --examples 10000 --out load
    """
    from experiments.bench.load import long_run, wide_run, write

    rows = []
    for name, case in (("wide", wide_run(examples)), ("long", long_run(steps))):
        for row in case if only in (None, name) else ():
            console.print_json(data=row)
            rows.append(row)
            write(rows, out)


def entry() -> None:
    """Run one of the commands; an error of leaveout ends in its one sentence, as in leaveout's own."""
    cli.entry(app)


if __name__ == "__main__":
    entry()
