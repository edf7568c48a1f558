"""leaveout plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from leaveout.cli.app import app, console
from leaveout.cli.made import made
from leaveout.plan import plan as lo_plan
from leaveout.resources import Resources
from leaveout.store import open_run


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
    own, query = made(task)
    found = lo_plan(
        own,
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
