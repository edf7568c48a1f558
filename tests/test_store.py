"""The run directory: shards never change a number, writes are whole or not at all, damage is named."""

import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout._util.files import checksum, unsealed, write_json, write_tensors
from leaveout._util.trees import PARAM, State
from leaveout.builtin.config import Config, TrainPart, run_config
from leaveout.optim import Rule
from leaveout.run.manifest import INITIAL, MANIFEST, Manifest, shard_name, write_manifest
from leaveout.run.record import Record
from leaveout.run.recording import writer as writing
from leaveout.run.recording.writer import Writer
from refusal import refused


def contents(path: Path) -> dict[str, bytes | None]:
    """Everything below a directory, byte for byte."""
    return {
        str(file.relative_to(path)): file.read_bytes() if file.is_file() else None for file in sorted(path.rglob("*"))
    }


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(20, 4, generator=draw), torch.randint(3, (20,), generator=draw))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def trained(path: Path, epochs: int = 3) -> tuple[lo.Run, lo.Task]:
    model = network()
    task = lo.Task(model, nn.CrossEntropyLoss(), data())
    return lo.train(task, torch.optim.Adam(model.parameters(), lr=0.05), epochs, 6, seed=1, out=path), task


def rewritten(run: lo.Run, path: Path, shard_bytes: int) -> lo.Run:
    """The same steps again in shards of another size."""
    writer = Writer(path, shard_bytes=shard_bytes)
    writer.begin(replace(run.manifest, shards=(), finished=False), run.state(0))
    for index in range(len(run)):
        writer.append(run.record(index), run.state(index + 1))
    writer.finish()
    return lo.open_run(path)


# Shards


@pytest.mark.full
def test_the_size_of_the_shards_changes_neither_states_nor_scores(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("leaveout.run.recording.writer.SHARD_SECONDS", 1e9)  # nor does the machine's speed
    run, task = trained(tmp_path / "run")
    assert [shard.steps for shard in run.manifest.shards] == [12]
    step = sum(3 * tensor.numel() * 4 for tensor in run.state(0)[PARAM].values())
    cuts = {"ones": (1, [1] * 12), "twos": (step + 1, [2] * 6), "uneven": (5 * step, [5, 5, 2]), "all": (10**9, [12])}
    expected = {
        method: method.score(run, task, data()).values
        for method in (lo.SGDIE(), lo.ACC(transport="exact"), lo.TracIn())
    }
    for name, (size, shards) in cuts.items():
        other = rewritten(run, tmp_path / name, size)
        assert [shard.steps for shard in other.manifest.shards] == shards
        assert sorted(file.name for file in (tmp_path / name).iterdir()) == sorted(
            [MANIFEST, INITIAL, *(shard_name(i) for i in range(len(shards)))]
        )
        for index in range(len(run) + 1):
            state, same = run.state(index), other.state(index)
            assert all(torch.equal(state[s][n], same[s][n]) for s in run.rule.slots for n in run.rule.groups)
        for index in (*range(len(run)), *reversed(range(len(run)))):
            record, same = run.record(index), other.record(index)
            assert torch.equal(record.ids, same.ids)
            assert (record.index, record.epoch, record.hypers, record.fingerprint) == (
                same.index,
                same.epoch,
                same.hypers,
                same.fingerprint,
            )
        for method, values in expected.items():
            assert torch.equal(method.score(other, task, data()).values, values)


def test_all_files_are_for_the_same_readers(tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run", epochs=1)
    assert len({file.stat().st_mode for file in run.path.iterdir()}) == 1


def test_steps_beyond_the_ends_are_refused(tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run", epochs=1)
    for ask in (run.record, run.state):
        with refused(lo.RunError, "step-out-of-range", "4 steps"):
            ask(5)
        with refused(lo.RunError, "step-out-of-range", "4 steps"):
            ask(-1)


RULE = Rule("SGD", {"w": 0}, (PARAM,))
HYPER = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0, "started": 0.0}


def state(value: float) -> State:
    return {PARAM: {"w": torch.full((3,), float(value))}}


def manifest() -> Manifest:
    """That of a real run, with a single small parameter instead of its own."""
    with tempfile.TemporaryDirectory() as folder:
        real = trained(Path(folder) / "run", epochs=1)[0].manifest
    return replace(real, rule=RULE, shapes={"w": [3]}, dtypes={"w": "float32"}, shards=(), finished=False)


def record(index: int, ids: list[int], prints: list[tuple[int, int]]) -> Record:
    return Record(index, index // 2, torch.tensor(ids), [HYPER], prints)


def test_batches_of_any_length_and_any_number_of_tensors(tmp_path: Path) -> None:
    given = [([4], [(7, 8)]), ([0, 1, 1], []), ([2, 3], [(0, 2**32 - 1), (3, 4), (5, 6)])]
    for size in (1, 10**6):
        writer = Writer(tmp_path / str(size), shard_bytes=size)
        writer.begin(manifest(), state(0))
        for index, (ids, prints) in enumerate(given):
            writer.append(record(index, ids, prints), state(index + 1))
        writer.finish()
        run = lo.open_run(tmp_path / str(size))
        assert [(run.record(i).ids.tolist(), run.record(i).fingerprint) for i in range(3)] == given
        assert [run.record(i).epoch for i in range(3)] == [0, 0, 1]
        assert [float(run.state(i)[PARAM]["w"][0]) for i in range(4)] == [0, 1, 2, 3]


# Whole or not at all


def test_a_failed_write_leaves_the_old_tensors(tmp_path: Path) -> None:
    file = tmp_path / "file.safetensors"
    write_tensors(file, {"a": torch.ones(2)})
    before = contents(tmp_path)
    with pytest.raises(Exception, match=r"(?i)sparse|contiguous|layout|storage"):
        write_tensors(file, {"a": torch.zeros(2), "b": torch.eye(2).to_sparse()})
    with pytest.raises(Exception, match=r"metadata|str"):
        write_tensors(file, {"a": torch.zeros(2)}, {"number": 3})  # type: ignore[dict-item]
    assert contents(tmp_path) == before


def test_a_full_disk_leaves_the_old_manifest_and_nothing_beside_it(tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run", epochs=1)
    before = contents(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            write_manifest(run.path, replace(run.manifest, finished=False))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_a_strangers_links_do_not_lead_a_writer_to_other_files(link: str, tmp_path: Path) -> None:
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.write_text("important")
    run.mkdir()
    getattr(run / ".lock", link)(mine)
    with refused(lo.RunError, "run-not-writable", ".lock"):
        trained(run, epochs=1)
    (run / ".lock").unlink()
    getattr(run / f".{INITIAL}.{os.getpid()}", link)(mine)
    getattr(run / f".{MANIFEST}.{os.getpid()}", link)(mine)
    trained(run, epochs=1)
    assert mine.read_text() == "important"
    assert sorted(contents(run)) == [INITIAL, MANIFEST, shard_name(0)]


@pytest.mark.parametrize("place", ["file/run", "x" * 300, "a\0b", "/sys/run"])
def test_places_that_cannot_be_written_are_refused_with_a_sentence(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("important")
    with refused(lo.RunError, "run-not-writable"):
        trained(tmp_path / place, epochs=1)
    with refused(lo.RunError, "run-not-writable"):
        run_config(Config(train=TrainPart(epochs=1)), tmp_path / place)
    with pytest.raises(lo.RunError):
        lo.open_run(tmp_path / place)
    assert list(contents(tmp_path)) == ["file"]


def test_a_failed_shard_is_noticed_and_loses_no_earlier_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", shard_bytes=1)
    writer.begin(manifest(), state(0))
    for index in range(3):
        writer.append(record(index, [index], []), state(index + 1))
    (tmp_path / "run" / shard_name(3)).mkdir()  # a file cannot be put in its place
    writer.append(record(3, [3], []), state(4))
    with pytest.raises(OSError, match="directory"):
        writer.finish()
    (tmp_path / "run" / shard_name(3)).rmdir()
    assert sorted(contents(tmp_path / "run")) == sorted([MANIFEST, INITIAL, *(shard_name(i) for i in range(3))])
    with refused(lo.RunError, "run-cut-short", "step 2"):
        lo.open_run(tmp_path / "run")
    run = lo.open_run(tmp_path / "run", partial=True)
    assert len(run) == 3
    assert float(run.final()[PARAM]["w"][0]) == 3


def test_every_moment_of_writing_is_a_run_that_can_be_read(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", shard_bytes=1)
    with refused(lo.RunError, "run-not-found", "manifest.json"):
        lo.open_run(tmp_path / "run", partial=True)
    writer.begin(manifest(), state(0))
    writer._wait()
    with refused(lo.RunError, "run-without-steps"):
        lo.open_run(tmp_path / "run", partial=True)
    writer.append(record(0, [0], []), state(1))
    for index in range(2):
        writer.append(record(index + 1, [index + 1], []), state(index + 2))  # the step before it is written now
        writer._wait()
        with refused(lo.RunError, "run-cut-short", f"step {index}:", "partial=True"):
            lo.open_run(tmp_path / "run")
        run = lo.open_run(tmp_path / "run", partial=True)
        assert len(run) == index + 1
        assert float(run.final()[PARAM]["w"][0]) == index + 1
        assert [file.name for file in run.path.iterdir() if file.name.startswith(".")] == [".lock"]
    writer.finish()
    assert len(lo.open_run(tmp_path / "run")) == 3


def test_the_last_state_is_kept_wherever_the_last_shard_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SHARD_STEPS", 2)
    for steps in range(1, 6):
        writer = Writer(tmp_path / str(steps))
        writer.begin(manifest(), state(0))
        for index in range(steps):
            writer.append(record(index, [index], []), None)
        writer.finish(state(steps))
        run = lo.open_run(tmp_path / str(steps))
        assert len(run) == steps
        assert float(run.final()[PARAM]["w"][0]) == steps


def test_a_run_left_unfinished_is_scored_only_on_request(tmp_path: Path) -> None:
    run, task = trained(tmp_path / "run")
    writer = Writer(tmp_path / "cut", shard_bytes=1)
    writer.begin(replace(run.manifest, shards=(), finished=False), run.state(0))
    for index in range(5):
        writer.append(run.record(index), run.state(index + 1))
    writer.finish(complete=False)
    with refused(lo.RunError, "run-cut-short", "step 4"):
        lo.open_run(tmp_path / "cut")
    part = lo.open_run(tmp_path / "cut", partial=True)
    assert len(part) == 5
    assert torch.equal(part.final()[PARAM]["0.weight"], run.state(5)[PARAM]["0.weight"])
    scores = lo.SGDIE().score(part, task, data())
    assert not torch.equal(scores.values, lo.SGDIE().score(run, task, data()).values)


# Directories that are taken


def occupied(path: Path) -> dict[str, Callable[[], None]]:
    def other_files() -> None:
        path.mkdir()
        (path / "thesis.tex").write_text("important")

    def hidden() -> None:
        path.mkdir()
        (path / ".hidden").write_text("important")

    def folder() -> None:
        (path / "sub").mkdir(parents=True)

    def file() -> None:
        path.write_text("important")

    def damaged() -> None:
        path.mkdir()
        (path / MANIFEST).write_text("{")

    return {
        "a run": lambda: trained(path, epochs=1) and None,
        "other files": other_files,
        "a hidden file": hidden,
        "a folder": folder,
        "a file": file,
        "a damaged run": damaged,
    }


@pytest.mark.parametrize("name", occupied(Path()))
def test_a_directory_that_holds_something_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    occupied(tmp_path / "run")[name]()
    before = contents(tmp_path)
    model = network()
    task = lo.Task(model, nn.CrossEntropyLoss(), data())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    holds = "already holds a run" if name in ("a run", "a damaged run") else "there already and not an empty directory"
    with pytest.raises(lo.RunError, match=f"run {holds}.*|run is {holds}.*") as caught:
        lo.train(task, optimizer, 1, 6, seed=0, out=tmp_path / "run")
    assert str(tmp_path / "run") in str(caught.value)
    assert "choose another" in str(caught.value)
    with pytest.raises(lo.RunError):
        lo.Recorder(tmp_path / "run", model, optimizer)
    assert contents(tmp_path) == before


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert len(trained(tmp_path / "empty", epochs=1)[0]) == 4
    assert len(trained(tmp_path / "a" / "b" / "c", epochs=1)[0]) == 4


# Damage


def damage(path: Path) -> dict[str, tuple[Callable[[], object], str]]:
    """What happened to a run directory, and what the refusal must say."""
    file, shard, initial = path / MANIFEST, path / shard_name(0), path / INITIAL

    def told(**changes: object) -> None:
        write_json(file, {**unsealed(json.loads(file.read_text())), **changes})

    def without(key: str) -> None:
        raw = unsealed(json.loads(file.read_text()))
        del raw[key]
        write_json(file, raw)

    def cut(what: Path) -> None:
        what.write_bytes(what.read_bytes()[:-40])

    again = "record .*again"
    return {
        "no manifest": (file.unlink, rf"does not hold a run \(no {MANIFEST}\).*give the directory"),
        "no directory": (lambda: shutil.rmtree(path), "does not hold a run"),
        "half a manifest": (lambda: file.write_text(file.read_text()[:90]), rf"{MANIFEST} is not a manifest.*{again}"),
        "an empty manifest": (lambda: file.write_text(""), rf"{MANIFEST} is not a manifest.*{again}"),
        "a binary manifest": (lambda: file.write_bytes(b"\xff\xfe\x00"), rf"{MANIFEST} is not a manifest.*{again}"),
        "a list": (lambda: file.write_text("[1, 2]"), rf"{MANIFEST} is not a manifest.*{again}"),
        "a missing key": (lambda: without("rule"), rf"{MANIFEST} is not a manifest.*rule.*{again}"),
        "an unknown key": (lambda: told(colour="red"), rf"{MANIFEST} is not a manifest.*colour.*{again}"),
        "no shards": (lambda: told(shards=None), rf"{MANIFEST} is not a manifest.*{again}"),
        "shards in words": (lambda: told(shards=["four"]), rf"{MANIFEST} is not a manifest.*{again}"),
        "an unknown format": (lambda: told(format=99), "format 99, this version reads 4 and before"),
        "an unknown optimizer": (
            lambda: told(rule={**json.loads(file.read_text())["rule"], "kind": "Sorcery"}),
            rf"{MANIFEST} is not a manifest.*Sorcery.*{again}",
        ),
        "a missing shard": (shard.unlink, f"{shard.name} cannot be read.*{again}"),
        "a truncated shard": (lambda: cut(shard), f"{shard.name} cannot be read.*{again}"),
        "an empty shard": (lambda: shard.write_bytes(b""), f"{shard.name} cannot be read.*{again}"),
        "a shard of something else": (
            lambda: write_tensors(shard, {"a": torch.ones(2)}),
            f"{shard.name}.*{again}",
        ),
        "a shorter shard": (lambda: shutil.copy(path.parent / "shorter" / shard.name, shard), f"{shard.name}.*{again}"),
        "no initial state": (initial.unlink, f"{INITIAL} cannot be read.*{again}"),
        "a truncated initial state": (lambda: cut(initial), f"{INITIAL} is not the file that was written.*{again}"),
        "an initial state of something else": (
            lambda: write_tensors(initial, {"a": torch.ones(2)}),
            f"{INITIAL}.*{again}",
        ),
    }


@pytest.mark.parametrize("name", damage(Path()))
def test_a_damaged_run_is_refused_with_the_file_and_what_to_do(name: str, tmp_path: Path) -> None:
    _, task = trained(tmp_path / "run", epochs=2)
    trained(tmp_path / "shorter", epochs=1)
    happen, message = damage(tmp_path / "run")[name]
    happen()
    with pytest.raises(lo.RunError, match=message) as caught:
        lo.Replay((0,)).score(lo.open_run(tmp_path / "run"), task, data())
    assert str(tmp_path / "run") in str(caught.value)


def test_a_shard_of_another_run_is_noticed(tmp_path: Path) -> None:
    run, task = trained(tmp_path / "run", epochs=1)
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    other = lo.train(
        lo.Task(model, nn.CrossEntropyLoss(), data()),
        torch.optim.Adam(model.parameters(), lr=0.05),
        1,
        6,
        seed=1,
        out=tmp_path / "other",
    )
    shutil.copy(other.path / shard_name(0), run.path / shard_name(0))
    with refused(lo.RunError, "run-damaged", "shard-00000.safetensors"):
        lo.open_run(run.path).record(0)
    shard = run.manifest.shards[0]
    claims = replace(shard, crc32=checksum(run.path / shard.name))  # even where somebody mended the checksum
    write_manifest(run.path, replace(run.manifest, shards=(claims,)))
    for method in (lo.ACC(transport="exact"), lo.SGDIE(), lo.TracIn(), lo.Replay()):
        with refused(lo.MismatchError, "step-does-not-follow", "does not follow"):
            method.score(lo.open_run(run.path), task, data())


def test_scores_do_not_change_a_run(tmp_path: Path) -> None:
    run, task = trained(tmp_path / "run", epochs=1)
    before = contents(tmp_path)
    parameters = {name: param.detach().clone() for name, param in task.model.named_parameters()}
    for method in (lo.ACC(transport="exact"), lo.SGDIE(), lo.TracIn(), lo.Replay()):
        method.score(run, task, data())
    assert contents(tmp_path) == before
    assert all(torch.equal(param, parameters[name]) for name, param in task.model.named_parameters())
