"""leaveout data."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from leaveout.builtin import data as sets
from leaveout.cli.app import console
from leaveout.cli.commands import app
from leaveout.errors import InputError

data = typer.Typer(
    help="The built-in data sets: which there are, and whether their files are here.", no_args_is_help=True
)
app.add_typer(data, name="data")


@data.command("list")
def listed() -> None:
    """Show the data sets, and whether their files are here (LEAVEOUT_DATA, then the cache).

    [dim]$[/dim] leaveout data list
    """
    table = Table("name", "training examples", "validation", "files")
    for name in sets.names():
        train, val = sets.sizes(name)
        table.add_row(name, f"{train:,}", f"{val:,}", "found" if sets.is_here(name) else "to be fetched")
    console.print(table)


@data.command()
def fetch(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; all of them if none is named.")] = None,
) -> None:
    """Find the files, download what is missing, and compare everything with the originals' checksums.

    [dim]$[/dim] leaveout data fetch adult mnist
    """
    for name in names or ():
        sets.sizes(name)  # refuses an unknown name
    failed = [name for name in names or sets.names() if not _fetched(name)]
    if failed:
        raise typer.Exit(1)


def _fetched(name: str) -> bool:
    try:
        dataset = sets.load(name)
    except InputError as error:
        console.print(f"{name}: {error}", style="red", markup=False, soft_wrap=True)
        return False
    console.print(
        f"{name}: {len(dataset.train):,} training, {len(dataset.val):,} validation, {len(dataset.test):,} test"
    )
    return True
