"""A run that was cut short goes on as if nothing had been; a directory has one writer."""

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import leaveout as lo
from leaveout.builtin import config
from leaveout.run.manifest import shard_name
from leaveout.run.recording import writer as writing
from problems import MODELS, OPTIMIZERS, data_for, mostly_full
from refusal import refused
from test_store import contents, manifest, record, state


class Cut(Exception):  # noqa: N818 - what a crash would be
    """The loop stops here."""


pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SHARD_STEPS", 4)


def made(optimizer: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, lo.Task]:
    torch.manual_seed(seed)
    make, loss, l2 = MODELS["mlp"]
    model = make()
    return model, OPTIMIZERS[optimizer](model), lo.Task(model, loss, data_for("mlp", 11, 0), l2=l2)


def told(path: Path, optimizer: str, *, stop: int | None = None, resume: bool = False, seed: int = 0, **how) -> lo.Run:
    """A loop that tells its ids, with a schedule, stopped before a step."""
    model, made_, task = made(optimizer, seed)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made_, 0.97)
    order = torch.Generator().manual_seed(0)
    plan = [(e, ids) for e in range(6) for ids in torch.randperm(11, generator=order).split(4)]
    with lo.Recorder(path, model, made_, resume=resume, **how) as recorder:
        for number, (epoch, ids) in enumerate(plan):
            if number < recorder.done:
                schedule.step()
                continue
            if number == stop:
                raise Cut
            made_.zero_grad()
            batch = task.read(ids.tolist())
            task.objective.losses(task.parameters(), batch).mean().backward()
            recorder.step(ids, batch, epoch=epoch)
            made_.step()
            schedule.step()
        return recorder.finish()


def same(one: lo.Run, two: lo.Run) -> None:
    """Every record and every kept state, bit for bit."""
    assert one.kept == two.kept
    for index in one.kept:
        a, b = one.state(index), two.state(index)
        assert all(torch.equal(a[slot][name], b[slot][name]) for slot in a for name in a[slot])
    for index in range(len(one)):
        a, b = one.record(index), two.record(index)
        assert torch.equal(a.ids, b.ids)
        assert (a.epoch, a.hypers, a.fingerprint) == (b.epoch, b.hypers, b.fingerprint)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(
    "how", mostly_full([{"keep": 1}, {"keep": 3}, {"keep": 5}, {"disk": 100}], {"keep": 3}), ids=str
)
def test_a_run_cut_short_twice_ends_as_the_undisturbed_one(optimizer: str, how: dict, tmp_path: Path) -> None:
    whole = told(tmp_path / "whole", optimizer, **how)
    for stop, seed in ((7, 0), (14, 5)):  # what is resumed does not depend on how the model was made
        with pytest.raises(Cut):
            told(tmp_path / "run", optimizer, stop=stop, resume=True, seed=seed, **how)
        assert lo.check_run(tmp_path / "run") == []
    run = told(tmp_path / "run", optimizer, resume=True, seed=99, **how)
    same(run, whole)
    assert lo.check_run(run.path) == []
    assert not any(file.name.startswith(".") for file in run.path.iterdir())


def test_scores_of_a_resumed_run_are_those_of_the_undisturbed_one(tmp_path: Path) -> None:
    whole = told(tmp_path / "whole", "nesterov", keep=3)
    with pytest.raises(Cut):
        told(tmp_path / "run", "nesterov", stop=11, keep=3)
    run = told(tmp_path / "run", "nesterov", resume=True, keep=3)
    query = data_for("mlp", 4, 1)
    for method in (lo.SGDIE(), lo.ACC("free"), lo.ACC("exact"), lo.Replay()):
        task = made("nesterov")[2]
        assert torch.equal(method.score(run, task, query).values, method.score(whole, task, query).values)


def watched(
    path: Path, *, stop: int | None = None, resume: bool = False, seed: int = 0, leave: int | None = None, n: int = 11
) -> lo.Run:
    """A loop over a shuffled loader; ``leave`` leaves the first epoch early."""
    model, optimizer, _ = made("momentum", seed=5 * resume)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    loader = DataLoader(data_for("mlp", n, 0), 4, shuffle=True, generator=torch.Generator().manual_seed(seed))
    with lo.Recorder(path, model, optimizer, resume=resume) as recorder:
        for epoch in range(5):
            for x, y in recorder.watch(loader):
                if recorder.done == stop:
                    raise Cut
                optimizer.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
                optimizer.step()
                if epoch == 0 and recorder.done == leave:
                    break
            schedule.step()
        return recorder.finish()


@pytest.mark.parametrize("n", [11, 12])  # 12: the last batch is full, and the sampler is not at its end with it
@pytest.mark.parametrize("leave", [None, 2])
def test_a_watched_loop_passes_over_the_batches_that_are_done(leave: int | None, n: int, tmp_path: Path) -> None:
    whole = watched(tmp_path / "whole", leave=leave, n=n)
    with pytest.raises(Cut):
        watched(tmp_path / "run", stop=8, leave=leave, n=n)
    run = watched(tmp_path / "run", resume=True, leave=leave, n=n)
    same(run, whole)


def test_a_loader_in_another_order_or_with_other_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Cut):
        watched(tmp_path / "run", stop=8)
    before = contents(tmp_path)
    with refused(lo.MismatchError, "batches-differ", "step 0"):
        watched(tmp_path / "run", resume=True, seed=5)
    with refused(lo.UnsupportedError, "loaders-differ", "12 examples, not 11"):
        watched(tmp_path / "run", resume=True, n=12)
    assert contents(tmp_path) == before


def trained(path: Path, *, resume: bool = True, optimizer: str = "adam", lr: float | None = None, **how) -> lo.Run:
    _, made_, task = made(optimizer)
    for group in made_.param_groups if lr else ():
        group["lr"] = lr
    return lo.train(task, made_, how.get("epochs", 4), how.get("size", 4), how.get("seed", 1), path, resume=resume)


def test_training_again_in_another_way_is_refused(tmp_path: Path) -> None:
    whole = trained(tmp_path / "run", resume=False)
    before = contents(tmp_path)
    same(trained(tmp_path / "run"), whole)  # a finished run is given back
    for how, code, *named in (
        ({"epochs": 5}, "batches-differ"),
        ({"epochs": 3}, "batches-differ"),
        ({"size": 5}, "batches-differ"),
        ({"seed": 2}, "batches-differ"),
        ({"lr": 0.7}, "optimizer-differs", "lr=0.05", "0.7"),
        ({"optimizer": "adamw"}, "optimizer-differs", "Adam"),
    ):
        with refused(lo.MismatchError, code, *named):
            trained(tmp_path / "run", **how)
    with refused(lo.RunError, "run-exists", "resume=True"):
        trained(tmp_path / "run", resume=False)
    assert contents(tmp_path) == before


def test_a_finished_run_takes_no_more_steps(tmp_path: Path) -> None:
    whole = watched(tmp_path / "run")
    before = contents(tmp_path)
    same(watched(tmp_path / "run", resume=True), whole)
    model, optimizer, _ = made("momentum")
    with lo.Recorder(tmp_path / "run", model, optimizer, resume=True) as recorder:
        assert recorder.done == len(whole)
        assert torch.equal(model.state_dict()["0.weight"], whole.final()["param"]["0.weight"])
        recorder.step([0])
        model(torch.zeros(1, 3, dtype=torch.float64)).sum().backward()
        with refused(lo.RunError, "run-finished"):
            optimizer.step()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("left", ["nothing", "a lock", "an initial state", "a manifest", "a shard"])
def test_what_a_killed_writer_leaves_is_gone_on_with(left: str, tmp_path: Path) -> None:
    whole = told(tmp_path / "whole", "adam", keep=2)
    path = tmp_path / "run"
    path.mkdir()
    if left != "nothing":
        (path / ".lock").write_text("1")
    if left not in ("nothing", "a lock"):
        shutil.copy(whole.path / "initial.safetensors", path)
        (path / ".manifest.json.77").write_text("{")
    if left in ("a manifest", "a shard"):
        writing.write_manifest(path, writing.replace(whole.manifest, shards=(), finished=False))
    if left == "a shard":
        shutil.copy(whole.path / shard_name(1), path / shard_name(0))
        (path / f".{shard_name(1)}.77").write_bytes(b"half")
    run = told(path, "adam", resume=True, keep=2)
    same(run, whole)
    assert sorted(contents(path)) == sorted(contents(whole.path))


def killed(work: Callable[[], object], *, at: int | None = None, size: int | None = None) -> bool:
    """Does the work in a child that is killed at a change of its disk, or in the middle of a file of this size."""
    child = os.fork()
    if child == 0:
        left = at or 0

        def count(event: str, args: tuple) -> None:
            nonlocal left
            made = event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
            if made or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            if size is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (-signal.SIGKILL, -signal.SIGXFSZ)


def test_a_run_killed_at_any_change_of_the_disk_goes_on_and_is_well(tmp_path: Path) -> None:
    begun, path, about = tmp_path / "begun", tmp_path / "run", manifest()
    writer = writing.Writer(begun)
    writer.begin(about, state(0))
    writer.append(record(0, [0], []), state(1))
    writer.append(record(1, [1], []), None)  # beyond the last kept state: this shard is written anew
    writer.finish(complete=False)

    def go_on() -> None:
        writer = writing.Writer(path, resume=True)
        for index in range(len(writer.before), 3):
            writer.append(record(index, [index], []), state(3) if index == 2 else None)
        writer.finish()

    for at in range(1, 200):
        shutil.copytree(begun, path)
        ended = not killed(go_on, at=at)
        assert lo.check_run(path) == [] or not lo.open_run(path, partial=True).manifest.finished
        go_on()
        assert lo.open_run(path).kept == [0, 1, 3]
        assert sorted(contents(path)) == ["initial.safetensors", "manifest.json", shard_name(1)]
        shutil.rmtree(path)
        if ended:
            break
    assert 8 < at < 199


@pytest.mark.parametrize("size", [0, 50, 100, 200, 300])
def test_a_run_killed_in_the_middle_of_a_file_goes_on(size: int, tmp_path: Path) -> None:
    path, about = tmp_path / "run", manifest()

    def work() -> None:
        writer = writing.Writer(path, resume=True)
        if not writer.unfinished:
            writer.begin(about, state(0))
        writer.append(record(0, [0], []), state(1))
        writer.finish()

    assert killed(work, size=size)
    work()
    assert lo.check_run(path) == []
    assert sorted(contents(path)) == ["initial.safetensors", "manifest.json", shard_name(0)]


def test_a_training_killed_while_its_config_is_written_goes_on(tmp_path: Path) -> None:
    plan = config.Config(config.DataPart(n_train=30, n_val=5), train=config.TrainPart(epochs=1))
    assert killed(lambda: config._leave(plan, tmp_path / "run"), size=20)
    assert list((tmp_path / "run").iterdir())
    run, _ = config.run_config(plan, tmp_path / "run")
    assert not any(file.name.startswith(".") for file in run.path.iterdir())
    assert lo.check_run(run.path) == []


def test_of_two_trainings_into_one_directory_the_second_is_refused(tmp_path: Path) -> None:
    plan = config.Config(config.DataPart(n_train=30, n_val=5), train=config.TrainPart(epochs=1))
    first = writing.claim(tmp_path / "run")  # before it has written anything
    with refused(lo.RunError, "directory-busy", str(os.getpid())):
        config.run_config(plan, tmp_path / "run")
    assert sorted(contents(tmp_path / "run")) == [".lock"]
    first.release()


def test_a_run_without_its_manifest_is_not_written_over(tmp_path: Path) -> None:
    whole = told(tmp_path / "run", "adam")
    (whole.path / "manifest.json").unlink()
    before = contents(tmp_path)
    with refused(lo.RunError, "directory-not-empty"):
        told(tmp_path / "run", "adam", resume=True)
    assert contents(tmp_path) == before


def test_another_model_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(Cut):
        told(tmp_path / "run", "sgd", stop=9)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):  # the first refusal lets go of the directory
        with refused(lo.MismatchError, "shapes-differ", "'0.weight'", "[4, 3]"):
            lo.Recorder(tmp_path / "run", model, OPTIMIZERS["sgd"](model), resume=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# One writer


def test_a_second_recorder_in_the_same_process_is_refused_unless_it_is_to_go_on(tmp_path: Path) -> None:
    model, optimizer, _ = made("sgd")
    first = lo.Recorder(tmp_path / "run", model, optimizer)
    other, another, _ = made("sgd")
    with refused(lo.RunError, "directory-busy", str(os.getpid())):
        lo.Recorder(tmp_path / "run", other, another)
    lo.Recorder(tmp_path / "run", other, another, resume=True)
    with refused(lo.RunError, "nothing-recorded"):
        first.finish()


def test_a_lock_is_let_go_when_its_process_is_killed_but_not_by_its_children(tmp_path: Path) -> None:
    told_, tell = os.pipe()
    holder = os.fork()
    if holder == 0:
        lock = writing.Lock(tmp_path)
        os.fork()  # lives on after its parent
        os.write(tell, b"held")
        signal.pause()
        lock.release()
    assert os.read(told_, 4) == b"held"
    assert os.read(told_, 4) == b"held"
    with refused(lo.RunError, "directory-busy", str(holder)):
        writing.Lock(tmp_path)
    child = int((Path("/proc") / str(holder) / "task" / str(holder) / "children").read_text().split()[0])
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    try:
        writing.Lock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []
