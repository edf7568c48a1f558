"""leaveout demo."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from leaveout.cli.app import console
from leaveout.cli.commands import app
from leaveout.demo import Demo, run_demo


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="A new directory for the run and the report; leaveout-demo by default.")
    ] = None,
) -> None:
    """Find flipped labels in handwritten digits: train, record, score, verify, report. Offline, in seconds.

    [dim]$[/dim] leaveout demo --out my-demo
    """
    console.print(
        "500 handwritten digits, a tenth of the labels flipped. A small network is trained and recorded; then every "
        "example is scored by what the validation loss would be without it, and the scores are checked by replaying "
        "the run exactly without 64 of the examples.\n"
    )
    _show(run_demo(out or free("leaveout-demo")))


def free(name: str) -> Path:
    """Return the directory of that name, or with the first free number appended."""
    names = (Path(name if i == 1 else f"{name}-{i}") for i in count(1))
    return next(path for path in names if not path.exists())


def _show(result: Demo) -> None:
    hits = len(set(result.issues.ids) & result.flipped)
    words = f"{len(result.issues)} labels look wrong, {hits} of the {len(result.flipped)} flipped ones among them.\n"
    console.print(words, style="bold", highlight=False)
    method = list(result.scores)[-1]
    table = Table(title=f"The 15 most harmful examples, by {method}")
    for heading in ("example", "label", "was flipped?", "loss change without it"):
        table.add_column(heading, justify="right")
    values = result.scores[method].mean()
    for i in result.scores[method].harmful(15):
        number = int(i)
        flipped = f"yes, was {result.truth[number]}" if number in result.flipped else "no"
        table.add_row(str(i), str(result.labels[number]), flipped, f"{values[number]:+.5f}")
    console.print(table)
    for name, scores in result.scores.items():
        console.print(
            f"\n[bold]{name}[/bold]: {result.caught(name)} of the {len(result.flipped)} flipped labels are among the "
            f"{len(result.flipped)} most harmful examples ({scores.cost.seconds:.1f} s, {scores.cost.hvps} "
            f"Hessian-vector products).\n{result.checks[name]}"
        )
    console.print(f"\nThe report, with pictures: [bold]{escape(str(result.page))}[/bold] (open it in a browser)")
