"""Kills the commands at random moments, starts them again, and compares what they give with an undisturbed run.

    python tests/soak.py            ten kills of each command
    python tests/soak.py 100        a hundred

Every command is killed with SIGKILL somewhere between its start and its end, again and again, until it has been killed
often enough; then it is left to finish. What it leaves must be, number for number, what it leaves undisturbed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leaveout as lo
from experiments.reproduce import runner
from experiments.reproduce.spec import Row, Settings, Spec
from leaveout.cli import entry
from leaveout.run.recording import writer

DATA = [
    "--data",
    "digits",
    "--n-train",
    "60",
    "--n-val",
    "30",
    "--hidden",
    "6",
    "--activation",
    "tanh",
    "--batch-size",
    "10",
]
SCORED = ["score", "run", "--method", "acc", "--method", "sgd-ie", "--method", "replay"]


def leaveout(*args: str) -> None:
    """A command as from the shell; ends the process unless it went well."""
    sys.argv = ["leaveout", *args]
    try:
        entry()
    except SystemExit as end:
        if end.code:
            raise


def train() -> None:
    """The built-in loop."""
    leaveout("train", *DATA, "--epochs", "30", "--keep", "7", "--out", "run")


def record() -> None:
    """A user's own loop over a shuffled loader, with momentum."""
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(40, 5, generator=draw), torch.randint(3, (40,), generator=draw))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    with lo.Recorder("run", model, optimizer, keep=5, resume=True) as recorder:
        for _ in range(20):
            for x, y in recorder.watch(loader):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()


def short() -> None:
    """A run to score."""
    leaveout("train", *DATA, "--epochs", "6", "--out", "run")


def scored() -> None:
    """A run with scores."""
    short()
    leaveout(*SCORED)


def score() -> None:
    """Three methods."""
    leaveout(*SCORED)


def verify() -> None:
    """Exact replays of a sample."""
    leaveout("verify", "run", "--replays", "12")


def cleanse() -> None:
    """Trainings without the most harmful."""
    leaveout("cleanse", "run", "--remove", "3", "--remove", "6", "--random", "2", "--shuffles", "2")


def cell(settings: Settings) -> list[Row]:
    """One small experiment: how large the scores of a run of this seed are."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(settings["seed"])
        model = nn.Linear(64, 10)
        digits = lo.data.load("digits", 50, 20, seed=settings["seed"])
        task = lo.Task(model, nn.CrossEntropyLoss(), digits.train)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = lo.train(task, optimizer, 2, 10, 0, Path(folder) / "run")
        return [{"size": float(lo.SGDIE().score(run, task, digits.val).values.norm())}]


def reproduce() -> None:
    """The cells of an experiment."""
    cells: Callable = lambda seeds, _quick: [{"seed": seed} for seed in range(seeds)]  # noqa: E731
    spec = Spec("soak", "small", 6, cells, cell, lambda _: "", ("seed",))
    runner.compute(spec, Path("results"))


COMMANDS: dict[str, tuple[Callable[[], None], Callable[[], None] | None]] = {
    "train": (train, None),
    "record": (record, None),
    "score": (score, short),
    "verify": (verify, scored),
    "cleanse": (cleanse, scored),
    "reproduce": (reproduce, None),
}
"""Each command, and what must be there before it."""


def told(folder: Path) -> dict[str, str]:
    """Everything that a command left, without what is different each time: times, memory, where shards end.

    A run's fingerprint depends on where its shards end; what is said of a run must be said of this one.
    """
    found = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.name == "manifest.json":
            found[name] = _run(file.parent)
        elif file.suffix == ".safetensors" and file.parent.name == "scores":
            scores = lo.Scores.load(file)
            found[name] = _digest(scores.values.numpy().tobytes(), repr((scores.method, scores.train_ids)).encode())
        elif file.suffix == ".json":
            content = json.loads(file.read_text())
            if content.get("run_fingerprint") is not None:
                content["run_fingerprint"] = content["run_fingerprint"] == lo.open_run(folder / "run").fingerprint
            found[name] = _digest(json.dumps(_timeless(content), sort_keys=True).encode())
        elif file.is_file() and not file.name.startswith(("shard-", "initial")):
            found[name] = ""
    return found


def _run(path: Path) -> str:
    run = lo.open_run(path)
    if damage := lo.check_run(path):
        raise AssertionError(damage)
    parts = [repr(run.kept).encode()]
    for index in range(len(run)):
        record = run.record(index)
        parts.append(repr((record.ids.tolist(), record.epoch, record.hypers, record.fingerprint)).encode())
    for index in run.kept:
        parts += [t.numpy().tobytes() for params in run.state(index).values() for t in params.values()]
    return _digest(*parts)


def _timeless(told: object) -> object:
    if isinstance(told, dict):
        return {k: _timeless(v) for k, v in told.items() if k not in ("cost", "crc32", "seconds")}
    return [_timeless(value) for value in told] if isinstance(told, list) else told


def _digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _child(command: Callable[[], None], folder: str) -> None:
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(Path(folder).parent / "cache")  # unfinished work of other code must not be found
    torch.set_num_threads(1)
    writer.SHARD_STEPS = 20  # so that there is something to go on with after a fraction of a second
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    command()


def _quick() -> multiprocessing.context.ForkServerContext:
    """A context whose processes begin with this module imported, so that kills meet the command and not its imports.

    The server looks for what it imports ahead on PYTHONPATH alone, and is silent where it finds nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["soak"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


class Soak:
    """Runs commands in processes that start quickly, and kills them."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self._folder = folder
        self._luck = random.Random(seed)
        self._context = _quick()

    def killed(self, name: str, kills: int) -> int:
        """Kills a command this often, lets it finish and compares; gives the number of starts."""
        command, before = COMMANDS[name]
        base = self._folder / name
        base.mkdir()
        if before is not None:
            self._finish(before, base)
        whole, seconds = self._copy(base), time.monotonic()
        self._finish(command, whole)
        seconds = time.monotonic() - seconds
        expected = told(whole)
        done = starts = 0
        while done < kills:
            folder = self._copy(base)
            for _ in range(self._luck.randint(1, 4)):
                starts += 1
                if not self._kill(command, folder, self._luck.uniform(0.02, seconds)):
                    break  # it was quicker
                done += 1
            code = self._run(command, folder)  # may refuse to replace what it had finished before it was killed
            left = told(folder)
            different = sorted(file for file in {*left, *expected} if left.get(file) != expected.get(file))
            assert not different, f"{different} differ after {name} was killed; it ended with {code}"
            shutil.rmtree(folder)
        return starts

    def _copy(self, base: Path) -> Path:
        folder = base.with_name(f"{base.name}-{self._luck.getrandbits(32):08x}")
        shutil.copytree(base, folder)
        return folder

    def _start(self, command: Callable[[], None], folder: Path) -> multiprocessing.Process:
        process = self._context.Process(target=_child, args=(command, str(folder)))
        process.start()
        return process

    def _kill(self, command: Callable[[], None], folder: Path, after: float) -> bool:
        process = self._start(command, folder)
        process.join(after)
        alive = process.is_alive()
        process.kill()
        process.join()
        return alive

    def _finish(self, command: Callable[[], None], folder: Path) -> None:
        code = self._run(command, folder)
        assert code == 0, f"{command.__name__} ended with {code} in {folder}"

    def _run(self, command: Callable[[], None], folder: Path) -> int | None:
        process = self._start(command, folder)
        process.join()
        return process.exitcode


def main(kills: int) -> None:
    """Every command."""
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder))
        for name in COMMANDS:
            starts = soak.killed(name, kills)
            sys.stdout.write(f"{name}: killed {kills} times or a few more in {starts} starts; the same in the end\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
