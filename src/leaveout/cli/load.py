"""leaveout load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from leaveout.cli.app import console
from leaveout.cli.commands import app


@app.command()
def load(
    steps: Annotated[int, typer.Option(help="Steps of the long run.")] = 1_000_000,
    examples: Annotated[int, typer.Option(help="Examples of the wide run.")] = 1_000_000,
    only: Annotated[Literal["wide", "long"] | None, typer.Option(help="One of the two; the other's rows stay.")] = None,
    out: Annotated[Path, typer.Option(help="Where load.json and load.md go.")] = Path("docs"),
) -> None:
    """Record very many steps, score very many examples, and watch the memory. Long: see docs/load.md.

    [dim]$[/dim] leaveout load --only wide --examples 10000 --out load
    """
    from leaveout.paper.bench.load import long_run, wide_run, write

    rows = []
    for name, case in (("wide", wide_run(examples)), ("long", long_run(steps))):
        for row in case if only in (None, name) else ():
            console.print_json(data=row)
            rows.append(row)
            write(rows, out)
