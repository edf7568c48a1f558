"""leaveout reproduce."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from leaveout.cli.app import ProcessesOption, RayOption, console, engine_of
from leaveout.cli.commands import app
from leaveout.compute.resources import Resources
from leaveout.errors import closest


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

    [dim]$[/dim] leaveout reproduce list

    [dim]$[/dim] leaveout reproduce convex --quick --out results

    [dim]$[/dim] leaveout reproduce nonconvex --seeds 3 --processes 2 --out results
    """
    from leaveout.paper.reproduce import SPECS, report, runner

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
