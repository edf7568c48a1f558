"""leaveout plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer
from rich.table import Table

from leaveout._util.amounts import parse_bytes
from leaveout.cli.app import AsJson, MemoryOption, console, opened, print_json, print_next
from leaveout.cli.commands import app
from leaveout.cli.subject import TaskOption, called, subject, subject_of
from leaveout.compute.resources import Resources
from leaveout.evaluate.plan import plan as lo_plan
from leaveout.evaluate.scale import Described, Planned, measured_rate, needs, size_of


@app.command()
def plan(
    run: Annotated[Path | None, typer.Argument(help="A recorded run; without one, a planned run is described.")] = None,
    task: TaskOption = None,
    epochs: Annotated[int, typer.Option(help="Of the planned run.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Of the planned run.")] = 64,
    lr: Annotated[float, typer.Option(help="Of the planned run, with plain SGD.")] = 0.1,
    model: Annotated[
        str | None, typer.Option(help="Instead of a task, package.module:function that returns a scale.Described.")
    ] = None,
    examples: Annotated[int, typer.Option(help="Training examples of a run planned by its model.")] = 1000,
    queries: Annotated[int, typer.Option(help="Query vectors of a run planned by its model.")] = 1,
    workers: Annotated[int, typer.Option(help="Workers of a run planned by its model.")] = 1,
    rate: Annotated[str, typer.Option(help="FLOP/s that a worker sustains, like 10T; auto: measured.")] = "auto",
    memory: MemoryOption = "auto",
    as_json: AsJson = False,
) -> None:
    """Predict time, memory and disk of every method along the run from a few measured steps.

    [dim]$[/dim] leaveout plan runs/digits

    [dim]$[/dim] leaveout plan runs/mine --task mypackage.mymodule:make_task

    [dim]$[/dim] leaveout plan --task mypackage.mymodule:make_task --epochs 20 --batch-size 64

    Or, for what does not fit here, from counted operations: see docs/scaling.md.

    [dim]$[/dim] leaveout plan --model leaveout.builtin.large:imagenet --examples 1281167 --epochs 90 --rate 10T
    """
    if model is not None:
        planned = Planned(examples, epochs, batch_size, queries, workers=workers)
        prediction = _counted(model, planned, rate, Resources(memory).bytes)
        _show(prediction, as_json)
        return
    if run is None and task is None:
        raise typer.BadParameter("a planned run needs its task: package.module:function.", param_hint="--task")
    recorded = None if run is None else opened(run)
    about = subject_of(run, task) if run is not None else subject(task or "")
    prediction = lo_plan(
        about.task,
        about.query,
        recorded,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        epochs=epochs,
        batch_size=batch_size,
        resources=Resources(memory),
    )
    _show(prediction, as_json)
    if run is not None and not as_json:
        print_next("score", run, task)


def _counted(model: str, planned: Planned, rate: str, memory: int) -> pd.DataFrame:
    description = called(model, "--model")
    if not isinstance(description, Described):
        raise typer.BadParameter(f"{model} returned no leaveout.evaluate.scale.Described.", param_hint="--model")
    sustained = measured_rate() if rate == "auto" else float(parse_bytes(rate, "rate"))
    return needs(size_of(description), planned, sustained, memory)


def _show(prediction: pd.DataFrame, as_json: bool) -> None:
    if as_json:
        print_json({"methods": prediction.reset_index().to_dict("records")})
        return
    table = Table(title="What every method would need")
    shards = ["shards"] if "shards" in prediction else []
    for heading in ("method", "time", "memory", "disk", *shards):
        table.add_column(heading, justify="right")
    for method, needed in prediction.iterrows():
        disk = f"{needed['disk'] / 1e9:,.2f} GB" if needed["disk"] else "-"
        row = [str(method), duration(needed["seconds"]), f"{needed['memory'] / 1e9:,.2f} GB", disk]
        table.add_row(*row, *(f"{needed[name]:,}" for name in shards))
    console.print(table)


def duration(seconds: float) -> str:
    """Write seconds in a readable unit.

    >>> duration(12.34), duration(7200.0), duration(1e6), duration(1e12)
    ('12.3 s', '2.0 hours', '11.6 days', '31,688 years')
    """
    for unit, length in (("years", 31_557_600), ("days", 86_400), ("hours", 3600)):
        if seconds >= 2 * length or (unit == "hours" and seconds >= length):
            return f"{seconds / length:,.0f} years" if unit == "years" else f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
