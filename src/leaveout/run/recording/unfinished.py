"""Recordings without an end: saved when the program ends, or ended when their directory is recorded into again."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from leaveout.errors import LeaveoutError, LeaveoutWarning
from leaveout.run.recording import failures

_WRITING: dict[Path, Callable[[], None]] = {}
"""What ends the recording into a directory."""


_RECORDED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""The optimizers that are being recorded."""


def check_unrecorded(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that another recorder is recording."""
    if optimizer in _RECORDED:
        raise failures.already_recording()


def until_finished(recorder: Any, writer: Any, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Save what a recorder has if the program ends without ``finish``; return a function that calls this off."""
    _RECORDED.add(optimizer)
    alive, owner, path = weakref.ref(recorder), os.getpid(), writer.path.resolve()
    save = atexit.register(partial(_save, writer, owner))

    def forget() -> None:
        atexit.unregister(save)
        _RECORDED.discard(optimizer)
        _WRITING.pop(path, None)

    def end() -> None:
        if os.getpid() != owner:  # a worker's copy
            return
        forget()
        try:
            if (recording := alive()) is not None:
                recording.__exit__(KeyboardInterrupt)
            else:
                writer.finish(complete=False)
        except (OSError, LeaveoutError):  # the directory is gone, for instance
            writer.abandon()

    _WRITING[path] = end
    return forget


def end_earlier(path: str | Path) -> None:
    """End a recording of this process into a directory, as an interrupted one: a notebook cell that runs again."""
    _WRITING.get(Path(path).resolve(), lambda: None)()


def _save(writer: Any, owner: int) -> None:
    if os.getpid() != owner or not writer.unfinished:  # a worker's copy, or nothing to save
        return
    writer.finish(complete=False)
    warnings.warn(
        f"The recording in {writer.path} was never finished and counts as cut short: call recorder.finish() after the "
        "training loop, or put the loop into `with lo.Recorder(...) as recorder:`. What was recorded is kept, and "
        "resume=True continues from there.",
        LeaveoutWarning,
        stacklevel=2,
    )
