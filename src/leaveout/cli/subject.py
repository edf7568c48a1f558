"""What a run is about: given by its config, or by a user's function named on the command line."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer

from leaveout.builtin import config
from leaveout.builtin.config import Subject
from leaveout.cli.app import complaints
from leaveout.errors import InputError, LeaveoutError, closest
from leaveout.run.manifest import check_config
from leaveout.run.paths import RunPaths
from leaveout.task.task import Task

TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="package.module:function that returns (task, query set), or (task, query set, test set); its code is run, "
        "also from this directory. Not needed for runs of leaveout train.",
    ),
]


def subject_of(run: Path, where: str | None) -> Subject:
    """Return the task and the queries of a run: the user's, or those of the config beside it."""
    if where is not None:
        return subject(where)
    file = RunPaths(run).config
    if not file.exists():
        raise InputError(
            f"{run} was not made by leaveout train (it has no {file.name}): say what was trained with "
            "--task package.module:function, a function that returns (task, query set).",
            code="task-missing",
        )
    check_config(run)
    return config.prepare(config.read(file))


def later(run: Path, where: str | None) -> Callable[[], Subject]:
    """Return a function that returns the same, and loads the data and builds the task only on its first call."""
    return cache(partial(subject_of, run, where))


def subject(where: str) -> Subject:
    """Return what the user's function returns, as a task and its queries."""
    return _checked(where, called(where, "--task"))


def called(where: str, option: str) -> Any:
    """Return what the user's function returns."""
    function = named(where, option)
    if not callable(function):
        raise typer.BadParameter(f"{where} is a {type(function).__name__}, not a function.", param_hint=option)
    try:
        return function()
    except (LeaveoutError, typer.BadParameter):
        raise
    except Exception as error:  # noqa: BLE001 - whatever the user's own code raises
        raise _failed(where, error) from None


def named(where: str, option: str) -> Any:
    """Return the object package.module:name; the module is also searched in the working directory."""
    module, _, name = where.partition(":")
    if not module or not name:
        raise typer.BadParameter(f"{where} must be written as package.module:function.", param_hint=option)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        members = vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(where, error) from None
        raise typer.BadParameter(
            f"{where}: there is no module {error.name!r} here or among what is installed.", param_hint=option
        ) from None
    except LeaveoutError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the user's own module raises
        raise _failed(where, error) from None
    file = members.get("__file__")
    if file is not None and Path(file).resolve().is_relative_to(Path.cwd().resolve()):
        complaints.print(f"{option} runs the code of {Path(file).name} in this directory.", style="dim", markup=False)
    if name not in members:
        raise typer.BadParameter(f"{where}: {module} has no {name!r}{closest(name, members)}.", param_hint=option)
    return members[name]


def _checked(where: str, answer: Any) -> Subject:
    if not isinstance(answer, tuple) or len(answer) not in (2, 3) or not isinstance(answer[0], Task):
        raise typer.BadParameter(
            f"{where} returned a {type(answer).__name__}: let it return (lo.Task(...), query set), or "
            "(lo.Task(...), query set, test set).",
            param_hint="--task",
        )
    return Subject(*answer)


def _failed(where: str, error: Exception) -> InputError:
    """Put an error of the user's code in a sentence, with its place in the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return InputError(
        f"{where} failed with {type(error).__name__}: {error}{place}; correct it and try again.",
        code="task-function-failed",
    )
