"""leaveout plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from leaveout.cli.app import AsJson, MemoryOption, app, console, opened, print_json
from leaveout.cli.made import TaskOption, subject, subject_of
from leaveout.plan import plan as lo_plan
from leaveout.resources import Resources


@app.command()
def plan(
    run: Annotated[Path | None, typer.Argument(help="A recorded run; without one, a planned run is described.")] = None,
    task: TaskOption = None,
    epochs: Annotated[int, typer.Option(help="Of the planned run.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Of the planned run.")] = 64,
    lr: Annotated[float, typer.Option(help="Of the planned run, with plain SGD.")] = 0.1,
    memory: MemoryOption = "auto",
    as_json: AsJson = False,
) -> None:
    """Predict time, memory and disk of every method from a few measured steps.

    [dim]$[/dim] leaveout plan runs/digits

    [dim]$[/dim] leaveout plan runs/mine --task mypackage.mymodule:make_task

    [dim]$[/dim] leaveout plan --task mypackage.mymodule:make_task --epochs 20 --batch-size 64
    """
    if run is None and task is None:
        raise typer.BadParameter("a planned run needs its task: package.module:function.", param_hint="--task")
    recorded = None if run is None else opened(run)
    about = subject_of(run, task) if run is not None else subject(task or "")
    found = lo_plan(
        about.task,
        about.query,
        recorded,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        epochs=epochs,
        batch_size=batch_size,
        resources=Resources(memory),
    )
    if as_json:
        print_json({"methods": found.reset_index().to_dict("records")})
        return
    table = Table(title="What every method would need")
    for heading in ("method", "time", "memory", "disk"):
        table.add_column(heading, justify="right")
    for method, needs in found.iterrows():
        disk = f"{needs['disk'] / 1e9:.2f} GB" if needs["disk"] else "-"
        table.add_row(str(method), f"{needs['seconds']:.1f} s", f"{needs['memory'] / 1e9:.2f} GB", disk)
    console.print(table)
