"""leaveout bench, and the long MNIST run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from leaveout.cli.app import console
from leaveout.cli.commands import app


@app.command()
def bench(
    only: Annotated[list[str] | None, typer.Option(help="Only these cases; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Where benchmarks.json and benchmarks.md go.")] = Path("docs"),
    processor: Annotated[
        bool, typer.Option("--processor-time", help="Measure processor time: for a machine that has other work.")
    ] = False,
) -> None:
    """Measure speed and fidelity as ratios in one run, on the real data sets (LEAVEOUT_DATA).

    [dim]$[/dim] leaveout bench

    [dim]$[/dim] leaveout bench --only image_sweeps --only replays --out benchmarks
    """
    import torch

    from leaveout.paper import bench as suite

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

    [dim]$[/dim] leaveout mnist --images 5000 --flipped 0.1 --replays 64 --work runs/mnist

    [dim]$[/dim] leaveout mnist --images 5000 --flipped 0.1 --replays 32 --moves 2 --work runs/mnist

    Each move takes as long as the replays. Where single images have no reproducible effect, random groups of growing
    size are replayed as well, 48 replays for each size; --no-groups leaves them out.
    """
    from leaveout.paper.bench.mnist import CHECKS, measure

    figures = measure(images, flipped, replays, out, work, moves, groups)
    long = ("harmful", *CHECKS)
    console.print_json(data={key: value for key, value in figures.items() if key not in long})
    console.print(figures[CHECKS[moves > 0]]["sentence"])
