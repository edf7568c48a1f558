"""Running the commands: within this process where that is enough, in one of their own where a signal is sent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from leaveout.cli import entry
from leaveout.errors import LeaveoutError

MADE = LeaveoutError.__init__
PROGRAM = [sys.executable, "-c", "from leaveout.cli import entry; entry()"]
SIZES = "--data digits --n-train 60 --n-val 30 --hidden 6 --activation tanh"
SMALL = [*SIZES.split(), "--epochs", "3"]

OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import leaveout as lo

def parts():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    return TensorDataset(x[:30], x[:30].sum(1)), TensorDataset(x[30:], x[30:].sum(1))

def make_task():
    torch.manual_seed(0)
    train, query = parts()
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    return lo.Task(model, nn.MSELoss(), train), query

def with_test():
    return *make_task(), parts()[1]

def broken():
    return torch.zeros(3) @ torch.zeros(4)

def wants():
    import not_a_module_anyone_has

def single():
    return make_task()[0]

if __name__ == "__main__":
    task, _ = make_task()
    lo.train(task, torch.optim.SGD(task.model.parameters(), lr=0.1), 3, 10, 0, "runs/own")
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    error: str | None = None
    """The code of the last error that was made, which commands do not print."""

    @property
    def words(self) -> str:
        """What was printed, as if no line had been broken."""
        return " ".join(self.out.split())

    @property
    def refusal(self) -> str:
        assert "Traceback" not in self.err
        return " ".join(self.err.replace("│", " ").split())

    @property
    def told(self) -> dict:
        assert self.code == 0, self.err
        return json.loads(self.out)


class Shell:
    """A working directory in which commands are run."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        program: Callable[[], object] = entry,
    ) -> None:
        self.folder, self._patch, self._capture, self._program = folder, monkeypatch, capsys, program
        monkeypatch.chdir(folder)

    def __call__(self, *args: str) -> Done:
        self._patch.setattr(sys, "argv", ["leaveout", *args])
        made: list[str] = []

        def noted(error: LeaveoutError, message: str, *, code: str) -> None:
            MADE(error, message, code=code)
            made.append(code)

        self._patch.setattr(LeaveoutError, "__init__", noted)
        self._capture.readouterr()
        try:
            self._program()
        except SystemExit as end:
            code = int(end.code or 0)
        else:
            code = 0
        self._patch.setattr(LeaveoutError, "__init__", MADE)
        return Done(code, *self._capture.readouterr(), made[-1] if made else None)

    @staticmethod
    def quietly(args: list[str]) -> int:
        """Run a command and return its exit code alone; what it prints goes wherever output goes."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["leaveout", *args])
            try:
                entry()
            except SystemExit as end:
                return int(end.code or 0)
        return 0


def started(*args: str, cwd: Path, shard_steps: int | None = None) -> subprocess.Popen[str]:
    """A command in a process of its own; with ``shard_steps`` the recorder writes to disk this often."""
    often = (
        ""
        if shard_steps is None
        else f"from leaveout.run.recording import writer; writer.SHARD_STEPS = {shard_steps}; "
    )
    program = [sys.executable, "-c", often + PROGRAM[-1]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def listening() -> None:
        # What a shell starts in the background ignores Ctrl-C, and so would its children.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        [*program, *args],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listening,
    )
