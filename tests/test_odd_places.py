"""Places, names and file systems that are not as usual: runs are recorded there, or it is said at once why not."""

import copy
import errno
import fcntl
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo
from commands import SMALL, Shell
from leaveout._util.lock import Lock, has_writer
from refusal import refused

DATA = TensorDataset(torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8) % 2)
LONE = ["caf\udce9", "caf\ud83d"]
"""A byte of a name in Latin-1, as Python reads it, and half of an emoji."""


def train(path: str | Path, name: str = "layer") -> lo.Run:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module(name, nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lo.Recorder(path, model, optimizer) as recorder:
        for x, y in recorder.watch(DataLoader(DATA, 4)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return recorder.finish()


def failing(call: Callable, number: int, when: Callable[[int], bool] = lambda _: True) -> Callable:
    """What a file system without this call does."""

    def fails(descriptor: int, *more: int) -> None:
        if when(descriptor):
            raise OSError(number, os.strerror(number))
        call(descriptor, *more)

    return fails


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_recorded_to_with_a_warning(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(fcntl.flock, number))
    with pytest.warns(lo.LeaveoutWarning, match="without locks"):
        run = train(tmp_path / "run")
    assert len(run) == 2
    assert lo.check_run(run.path) == []
    with pytest.warns(lo.LeaveoutWarning, match="without locks"):
        lock = Lock(tmp_path)
    assert not has_writer(tmp_path)
    lock.release()


def test_a_lock_that_fails_otherwise_is_no_other_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(fcntl.flock, errno.EIO))
    with refused(lo.RunError, "run-not-writable", os.strerror(errno.EIO)):
        train(tmp_path / "run")


def test_directories_that_cannot_be_synced_are_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(os.fsync, errno.EINVAL, lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode)))
    run = train(tmp_path / "run")
    assert run.manifest.finished
    assert lo.check_run(run.path) == []


def test_a_disk_that_fails_is_not_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(os.fsync, errno.EIO))
    with refused(lo.RunError, "run-not-writable", os.strerror(errno.EIO), "mend that"):
        train(tmp_path / "run")


def test_no_command_waits_for_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    shell = Shell(tmp_path, monkeypatch, capsys)
    shell("train", *SMALL, "--out", "run")
    shell("labels", "run")
    shell("score", "run", "--method", "tracin")
    for name, command in {
        "run/examples.csv": ["export", "run"],
        "table.csv": ["labels", "run", "--csv", "table.csv"],
        "run/report.html": ["report", "run"],
    }.items():
        os.mkfifo(name)
        done = shell(*command)
        assert (done.code, done.error, Path(name).name in done.refusal) == (1, "file-not-writable", True), command


@pytest.mark.parametrize("address", ["github://a", "github://a:b@c/d", "s3://bucket/run", "file:///tmp/run", "x://y"])
def test_a_run_is_recorded_on_this_machine(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(lo.RunError, "run-not-writable", address, "no local directory", unchanged=tmp_path):
        train(address)


@pytest.mark.parametrize("address", ["github://a", "dbfs://a", "hdfs://a", "http://localhost:1/run"])
def test_an_address_that_does_not_open_is_refused_whatever_its_library_raises(address: str) -> None:
    with pytest.raises(lo.LeaveoutError) as caught:
        lo.open_run(address)
    assert caught.value.code in ("address-not-reachable", "run-not-fetched")
    assert address in str(caught.value)


@pytest.mark.parametrize("name", LONE)
def test_names_that_are_not_utf8_are_refused_before_the_training(name: str, tmp_path: Path) -> None:
    with refused(lo.RunError, "run-not-writable", "UTF-8", unchanged=tmp_path) as caught:
        train(tmp_path / name)
    str(caught.value).encode()  # it can be printed
    with refused(lo.UnsupportedError, "model-not-supported", "UTF-8", ascii(f"{name}.weight")[1:-1]):
        train(tmp_path / "run", name)


def test_a_run_whose_directory_has_no_such_name_is_not_called_damaged(tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    run.path.rename(tmp_path / LONE[0])
    with refused(lo.InputError, "address-not-reachable", "rename it"):
        lo.open_run(tmp_path / LONE[0])
    (tmp_path / LONE[0]).rename(tmp_path / "café")
    assert len(lo.open_run(tmp_path / "café")) == 2


def test_commands_print_names_that_are_not_utf8(tmp_path: Path) -> None:
    program = (
        "from leaveout.cli.app import console; from leaveout.cli import entry; entry(lambda: console.print('\\udce9'))"
    )
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([sys.executable, "-c", program], env=strict, capture_output=True, check=True)
    assert done.stdout.strip() == rb"\udce9"


def test_a_recorder_is_neither_pickled_nor_copied(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    recorder = lo.Recorder(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1))
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        with refused(lo.UnsupportedError, "recorder-not-copied", "finish()"):
            take(recorder)
    with pytest.raises(lo.RunError):
        recorder.finish()
