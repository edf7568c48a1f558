"""What recording, its files, replays, plans and imports cost: one function per claim, each measuring both sides."""

from __future__ import annotations

import copy
import gc
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from experiments.bench.problems import (
    QUIET,
    binary,
    folder,
    images,
    language,
    quickest,
    seconds,
    slower,
    small_gpt,
    texts,
)
from experiments.bench.table import Row
from leaveout._util.trees import PARAM, nbytes
from leaveout.estimators import ACC, SGDIE, Estimator, Replay, TracIn
from leaveout.evaluate.plan import plan
from leaveout.run.reader import Run
from leaveout.run.recording.recorder import Recorder
from leaveout.task.task import Task

IN_MEMORY = "with the files in memory; on this machine's disk"


def recording() -> list[Row]:
    """Measure what recording adds to an ordinary loop over images; the disk's own speed is left out."""
    rows = []
    for n, what in ((20_000, "MNIST CNN"), (9_024, "MNIST CNN, 141 steps")):
        dataset, task, _ = images(n, 1)
        loop = _loop(task.model, dataset.train, 64, lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
        ways = (partial(loop, None), partial(loop, "auto"), partial(loop, "auto", memory=False))
        (times, _), (plain, recorded, written) = slower(20, *ways)
        how = f"keep='auto', the median of 20 rounds; at best {plain:.2f} s and {recorded:.2f} s, {IN_MEMORY} "
        rows.append(Row(f"recorded / unrecorded training, {what}", times, "<=", 1.08, f"{how}{written:.2f} s"))
    return rows


def recording_gpt() -> list[Row]:
    """Measure what recording adds to training a GPT with AdamW; the disk's own speed is left out."""
    train_set, _ = texts(960, 100)
    loop = _loop(small_gpt(), train_set, 32, lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3), epochs=2)
    ways = (partial(loop, None), partial(loop, "all"), partial(loop, "auto"), partial(loop, "all", memory=False))
    (all_times, auto_times, _), (plain, every, auto, written) = slower(10, *ways)
    what = "GPT of 1.3 million parameters, AdamW"
    how = f"60 steps of 32 texts, the median of ten rounds; at best {plain:.2f} s and {{:.2f}} s, {IN_MEMORY} "
    how += f"{written:.2f} s"
    return [
        Row(f"recorded / unrecorded, {what}, states at every step", all_times, "<=", 1.08, how.format(every)),
        Row(f"recorded / unrecorded, {what}, keep='auto'", auto_times, "<=", 1.08, how.format(auto)),
    ]


def disk() -> list[Row]:
    """Measure the bytes on disk per parameter and step of an AdamW run that keeps every state."""
    _, _, run = language(960, 3)
    size = sum(file.stat().st_size for file in run.path.iterdir())
    width = nbytes({PARAM: run.final()[PARAM]}) / 4
    each = size / width / len(run)
    how = f"GPT, {width / 1e6:.1f} million parameters, {len(run)} steps, {size / 1e6:.0f} MB with everything else"
    return [Row("bytes per parameter and step on disk, AdamW, states at every step", each, "<=", 6, how)]


def _loop(
    model: nn.Module, train_set: Dataset, size: int, optimizer: Callable, *, epochs: int = 1
) -> Callable[..., None]:
    """Build an ordinary training loop, which is recorded if it is told which states to keep."""
    loader = DataLoader(train_set, batch_size=size, shuffle=True)
    loss = nn.CrossEntropyLoss()

    def loop(keep: str | None, *, memory: bool = True) -> None:
        net = copy.deepcopy(model)
        made = optimizer(net)
        where = folder(memory=memory)
        recorder = Recorder(where, net, made, keep=keep) if keep else None
        watched = recorder.watch(loader) if recorder else loader
        for _ in range(epochs):
            for x, y in watched:
                made.zero_grad()
                loss(net(x), y).backward()
                made.step()
        if recorder:
            recorder.finish()
        shutil.rmtree(where.parent)

    return loop


def image_replays() -> list[Row]:
    """Compare exact replays of 32 images with as many plain training runs."""
    dataset, task, run = images(2_560, 4)
    plain, replay = _replayed(task, run, dataset.val, 32, torch.optim.SGD, 0.05, rounds=1)
    how = f"{len(run)} steps of 64, 4 epochs: {replay:.1f} s, a plain training {plain:.2f} s"
    return [Row("Replay of 32 / 32 plain trainings, MNIST CNN", replay / (32 * plain), "<=", 0.6, how)]


def text_replays() -> list[Row]:
    """Compare exact replays of 64 texts with as many plain training runs."""
    val, task, run = language(960, 1)
    plain, replay = _replayed(task, run, val, 64, torch.optim.AdamW, 1e-3, rounds=1)
    how = (
        f"{len(run)} steps of 32, 1 epoch, AdamW: {replay:.1f} s, a plain training {plain:.2f} s; on average a replay "
        f"takes {len(run) / 2 + 0.5:g} of the steps"
    )
    return [Row("Replay of 64 / 64 plain trainings, GPT", replay / (64 * plain), "<=", 0.5, how)]


def _replayed(
    task: Task, run: Run, query: Dataset, count: int, kind: Callable, lr: float, rounds: int = 2
) -> tuple[float, float]:
    """Time plain training over the run's batches, and Replay of ``count`` examples spread over the data."""
    ids = torch.linspace(0, task.size - 1, count).long().tolist()
    plans = [run.record(i).ids for i in range(len(run))]
    start = run.state(0)[PARAM]
    x, y = task.train_set.tensors  # type: ignore[attr-defined]
    loss = nn.CrossEntropyLoss()

    def training() -> None:
        model = copy.deepcopy(task.model)
        model.load_state_dict(start)
        optimizer = kind(model.parameters(), lr=lr)
        for rows in plans:
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()

    (plain,) = quickest(3 * rounds, training)
    (replay,) = quickest(rounds, lambda: Replay(ids=ids).score(run, task, query, resources=QUIET))
    return plain, replay


def plans() -> list[Row]:
    """Compare the times that ``plan`` predicts with the actual ones."""
    rows = []
    cheap: list[Estimator] = [TracIn(), SGDIE(), ACC()]
    for what, (dataset, task, run), methods in (
        ("MNIST CNN", images(20_000, 1), cheap),
        ("Adult 8-8", binary("adult", "mlp", epochs=38), [*cheap, ACC("exact"), Replay()]),
    ):
        planned = plan(task, dataset.val, run, resources=QUIET)["seconds"]
        real = {m.resolved(run).name: min(_alone(m, run, task.anew(), dataset.val) for _ in range(2)) for m in methods}
        worst = float(max(max(planned[name] / real[name], real[name] / planned[name]) for name in real))
        how = ", ".join(f"{name} {planned[name]:.1f} and {real[name]:.1f} s" for name in real) + ", the quicker of two"
        rows.append(Row(f"planned and real time, larger / smaller, {what}", worst, "<=", 1.5, how))
    return rows


def planning() -> list[Row]:
    """Measure how long a plan takes for a short run of a CNN, and for one whose methods take minutes."""
    rows = []
    for n, what in ((5_120, "80 steps"), (20_000, "313 steps")):
        dataset, task, run = images(n, 1)
        taken, table = seconds(lambda: plan(task, dataset.val, run, resources=QUIET))  # noqa: B023 - called at once
        each = table["seconds"]
        shared = each.drop(["ACC(exact)", "Replay"], errors="ignore")  # row by row, these take hours for all examples
        how = (
            f"predicts {shared.sum():.0f} s for {', '.join(shared.index)} together, of which it took "
            f"{taken / shared.sum():.2f}; {each.drop(shared.index).sum() / 3600:.0f} hours for all examples by "
            f"{' and '.join(each.drop(shared.index).index)}"
        )
        rows.append(Row(f"seconds that plan takes, MNIST CNN, {what}", taken, "<=", 10.0, how))
    return rows


def _alone(method: Estimator, run: Run, task: Task, query: Dataset) -> float:
    """Time a method on its own, without the garbage that others left to be collected."""
    gc.collect()
    return method.score(run, task, query, resources=QUIET).cost.seconds


def imports() -> list[Row]:
    """Measure the CPU time of ``import leaveout`` beyond ``import torch``, and of ``leaveout --version``."""
    python = sys.executable
    names = "import leaveout as lo; lo.Recorder, lo.Task, lo.SGDIE, lo.verify"
    bare, alone, used, version = (
        min(_processor([python, "-c", code]) for _ in range(5))
        for code in (
            "import torch",
            "import torch, leaveout",
            f"import torch; {names}",
            "import sys; sys.argv[1:] = ['--version']; from leaveout.cli import entry; entry()",
        )
    )
    how = f"processor time, the least of five; with Recorder, Task, SGDIE and verify used {used - bare:.2f} s"
    return [
        Row("seconds of import leaveout beyond import torch", max(0.0, alone - bare), "<=", 0.3, how),
        Row("seconds of leaveout --version", version, "<=", 0.3, "processor time, the least of five"),
    ]


def _processor(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - the commands above
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


CASES = (recording, recording_gpt, disk, image_replays, text_replays, plans, planning, imports)
