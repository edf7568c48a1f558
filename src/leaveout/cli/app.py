"""The application that the commands join, and the console that they print to."""

from __future__ import annotations

import typer
from rich.console import Console

app = typer.Typer(
    help="Which training examples made your model what it is, and what would it be without them?",
    no_args_is_help=True,
    add_completion=False,
)
console = Console()


@app.callback()
def main() -> None:
    """Which training examples made your model what it is, and what would it be without them?"""
