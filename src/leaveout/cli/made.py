"""A user's own task, named on the command line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import typer
from torch.utils.data import Dataset

from leaveout.task import Task


def made(where: str) -> tuple[Task, Dataset]:
    """Calls the user's function; its module is looked for in the working directory as well."""
    module, _, name = where.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        task, query = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise typer.BadParameter(f"{where} gives no (task, query set): {error}") from None
    return task, query
