"""The application and its list of commands: a command's file is imported when the command is called, not before.

So ``leaveout --help`` and ``leaveout --version`` load neither torch nor anything else that takes time.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from leaveout.cli.app import resumable
from leaveout.errors import closest

DAILY, DATA = "From a run to an answer", "Data"


class Command(NamedTuple):
    """A command as ``--help`` lists it: its first line and its panel."""

    summary: str
    panel: str = DAILY


COMMANDS = {
    "demo": Command(
        "Find flipped labels in handwritten digits: train, record, score, verify, report. Offline, in seconds."
    ),
    "train": Command("Train and record a built-in model on a built-in data set."),
    "score": Command("Score every training example: how would the query loss change without it?"),
    "verify": Command("Compare scores with exact leave-one-out replays: can they be trusted?"),
    "refine": Command("Replace the most extreme scores by exact leave-one-out replays."),
    "labels": Command("Say which training labels look wrong, from the recorded run alone: no query is needed."),
    "cleanse": Command("Remove the most harmful examples, train again, and measure on the test set."),
    "report": Command(
        "Write one page to look at: pictures, scores, how far to trust them. It needs no network and no other file."
    ),
    "export": Command(
        "Write one table of everything that is known about each training example: labels, scores, which are exact."
    ),
    "show": Command(
        "Say what a run holds: what was trained, how long, how many states are kept, and which scores it has."
    ),
    "plan": Command("Predict time, memory and disk of every method along the run from a few measured steps."),
    "data": Command("The built-in data sets: which there are, and whether their files are here.", DATA),
}
"""Every command, in the order of ``--help``."""


class LazyGroup(TyperGroup):
    """A group that knows its commands by name and summary, and loads the one that is called."""

    def list_commands(self, _ctx: Any) -> list[str]:
        """List every command by name."""
        return list(COMMANDS)

    def get_command(self, _ctx: Any, cmd_name: str) -> Any:
        """Return a placeholder that ``--help`` can describe."""
        if cmd_name not in COMMANDS:
            return None
        summary, panel = COMMANDS[cmd_name]
        return TyperCommand(cmd_name, help=summary, rich_help_panel=panel)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; Ctrl-C before there is anything to resume ends in a sentence too."""
        with resumable("The same command begins again."):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Load the command that the arguments name; for a mistyped one, suggest a similar name."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}{closest(args[0], COMMANDS)}.")
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load(str(name)), rest


def load(name: str) -> Any:
    """Import a command's file and return the command itself."""
    import_module(f"leaveout.cli.{name}")
    return get_group(app).commands[name]


def options(name: str) -> list[str]:
    """List the long options of a command."""
    if name not in COMMANDS:
        return []
    return [option for param in load(name).params for option in param.opts if option.startswith("--")]


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    epilog="Exit codes: 0 all went well, 1 refused (the reason and the remedy are on stderr), 2 the command line is "
    "wrong, 130 interrupted by Ctrl-C; what was finished is kept.",
)


@app.callback(invoke_without_command=True)
def main(show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    """Which training examples made your model what it is, and what would it be without them?

    The way through, on data that need no network:

    [dim]$[/dim] leaveout train --data digits --flip 0.1 --hidden 16 --activation tanh --out runs/digits

    [dim]$[/dim] leaveout labels runs/digits

    [dim]$[/dim] leaveout score runs/digits

    [dim]$[/dim] leaveout verify runs/digits

    [dim]$[/dim] leaveout cleanse runs/digits

    [dim]$[/dim] leaveout report runs/digits --open

    Your own model: record it with lo.Recorder, then name a function that returns (task, query set):

    [dim]$[/dim] leaveout score runs/mine --task mypackage.mymodule:make_task
    """
    if show_version:
        typer.echo(f"leaveout {version('leaveout')}")
        raise typer.Exit
