"""Files that were truncated, changed, lost or exchanged: the same score, or a refusal; never another score."""

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout._util.files import checksum, tensor_checksum, unsealed, write_json, write_tensors
from leaveout.builtin import config
from leaveout.cli.subject import subject_of
from leaveout.run.manifest import INITIAL, MANIFEST, shard_name, write_manifest
from leaveout.run.recording.writer import Writer
from refusal import refused
from test_store import contents

METHODS = (lo.SGDIE(), lo.TracIn(), lo.Replay((0, 3)))
SHARDS = 4


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(12, 3, generator=draw), torch.randint(2, (12,), generator=draw))


def recorded(path: Path, seed: int, keep: int) -> tuple[lo.Run, lo.Task]:
    """A run of twelve steps in four shards."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    task = lo.Task(model, nn.CrossEntropyLoss(), data())
    optimizer = torch.optim.SGD(model.parameters(), 0.3, 0.9)
    run = lo.train(task, optimizer, 3, 3, seed=1, out=path.with_suffix(".whole"), keep=keep)
    writer = Writer(path)
    writer.begin(replace(run.manifest, shards=(), finished=False), run.state(0))
    for index in range(len(run)):
        writer.append(run.record(index), run.state(index + 1) if index + 1 in run.kept else None)
        if index % 3 == 2:
            writer._flush()
    writer.finish()
    return lo.open_run(path), task


class Vandal:
    """Does something to a directory, by the luck of the seed."""

    def __init__(self, seed: int, folder: Path, other: Path) -> None:
        self.luck = random.Random(seed)
        self.folder, self.other = folder, other

    def file(self) -> Path:
        return self.luck.choice(sorted(self.folder.iterdir()))

    def truncate(self) -> None:
        file = self.file()
        whole = file.read_bytes()
        file.write_bytes(whole[: self.luck.randrange(len(whole))])

    def flip(self) -> None:
        file = self.file()
        changed = bytearray(file.read_bytes())
        for _ in range(self.luck.choice((1, 1, 1, 8))):
            changed[self.luck.randrange(len(changed))] ^= 1 << self.luck.randrange(8)
        file.write_bytes(changed)

    def smear(self) -> None:
        file = self.file()
        changed = bytearray(file.read_bytes())
        start, length = self.luck.randrange(len(changed)), self.luck.choice((1, 8, 64, 512))
        stretch = bytes(length) if self.luck.random() < 0.5 else self.luck.randbytes(length)
        changed[start : start + length] = stretch[: len(changed) - start]
        file.write_bytes(changed)

    def grow(self) -> None:
        with self.file().open("ab") as file:
            file.write(self.luck.randbytes(self.luck.choice((1, 8, 100))))

    def lose(self) -> None:
        self.file().unlink()

    def swap(self) -> None:
        one, two = self.luck.sample(sorted(self.folder.iterdir()), 2)
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)

    def double(self) -> None:
        one, two = self.luck.sample(sorted(self.folder.iterdir()), 2)
        shutil.copy(one, two)

    def foreign(self) -> None:
        file = self.file()
        shutil.copy(self.other / file.name, file)

    def act(self) -> str:
        kinds = (self.truncate, self.flip, self.flip, self.smear, self.grow, self.lose, self.swap, self.double)
        act = self.luck.choice((*kinds, self.foreign))
        act()
        return act.__name__


@pytest.mark.parametrize(("keep", "count"), [(1, 200), (5, 100)])
def test_a_damaged_run_gives_the_same_score_or_a_refusal(keep: int, count: int, tmp_path: Path) -> None:
    run, task = recorded(tmp_path / "run", 0, keep)
    other, _ = recorded(tmp_path / "other", 1, keep)
    whole = [method.score(run, task, data()).values for method in METHODS]
    before = contents(run.path)
    assert len(before) == SHARDS + 2
    refused = 0
    for seed in range(count):
        folder = tmp_path / "damaged"
        shutil.copytree(run.path, folder)
        what = Vandal(seed, folder, other.path).act()
        changed = contents(folder) != before
        told = None
        try:
            found = METHODS[seed % 3].score(lo.open_run(folder), task, data()).values
            assert torch.equal(found, whole[seed % 3]), f"{what}, seed {seed}"
        except lo.LeaveoutError as error:
            told = str(error)
        if told is not None:
            refused += 1
            assert changed, told
            assert str(folder) in told
            assert lo.check_run(folder), f"{what}, seed {seed}: {told}"
        shutil.rmtree(folder)
    assert refused > 0.9 * count
    assert contents(run.path) == before


def test_damaged_scores_and_checks_are_the_same_or_refused(tmp_path: Path) -> None:
    run, task = recorded(tmp_path / "run", 0, 1)
    (tmp_path / "saved").mkdir()
    (tmp_path / "other").mkdir()
    scores = lo.SGDIE().score(run, task, data(), displacements=True)
    other = lo.TracIn().score(run, task, data(), displacements=True)
    for folder, mine in (("saved", scores), ("other", other)):
        mine.save(tmp_path / folder / "scores")
        lo.verify(mine, run, task, data(), replays=8).save(tmp_path / folder / "check")
    check = lo.Check.load(tmp_path / "saved" / "check")
    refused = 0
    for seed in range(150):
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "saved", folder)
        vandal = Vandal(seed, folder, tmp_path / "other")
        vandal.luck.choice((vandal.truncate, vandal.flip, vandal.smear, vandal.grow, vandal.lose, vandal.swap))()
        try:
            found = lo.Scores.load(folder / "scores")
            assert torch.equal(found.values, scores.values)
            assert (found.method, found.train_ids, found.query_ids, found.cost) == (
                (scores.method, scores.train_ids, scores.query_ids, scores.cost)
            )
            assert all(torch.equal(found.displacements[name], moved) for name, moved in scores.displacements.items())
            again = lo.Check.load(folder / "check")
            assert again.table.equals(check.table)
            assert (again.extreme, again.random, again.method) == (check.extreme, check.random, check.method)
        except lo.RunError:
            refused += 1
        shutil.rmtree(folder)
    assert refused > 120


def test_a_check_names_every_damaged_file(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path / "run", 0, 1)
    assert lo.check_run(run.path) == []
    shutil.copy(run.path / shard_name(0), run.path / shard_name(7))
    (run.path / shard_name(1)).write_bytes(b"")
    (run.path / INITIAL).unlink()
    told = "\n".join(lo.check_run(run.path))
    assert all(name in told for name in (shard_name(1), shard_name(7), INITIAL))
    assert shard_name(0) not in told
    assert shard_name(2) not in told
    assert lo.check_run(tmp_path) == [str(refusal(tmp_path))]


def refusal(path: Path) -> lo.LeaveoutError:
    with pytest.raises(lo.RunError) as caught:
        lo.open_run(path)
    return caught.value


def test_a_file_that_changes_after_it_was_read_is_read_through_again(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path / "run", 0, 1)
    first, state = run.record(0), run.state(1)
    ids, weights = first.ids.clone(), state["param"]["0.weight"].clone()
    file = run.path / shard_name(0)
    with file.open("r+b") as opened:  # in place: it stays the same file
        opened.seek(-file.stat().st_size // 2, os.SEEK_END)
        opened.write(bytes([255]) * (file.stat().st_size // 2))
    for ask in (run.record, run.state):
        with refused(lo.RunError, "run-damaged", "checksum"):
            ask(1)
    assert torch.equal(first.ids, ids)
    assert torch.equal(state["param"]["0.weight"], weights)


def test_a_config_that_was_changed_after_the_run_is_named(tmp_path: Path) -> None:
    plan = config.Config(config.DataPart(n_train=30, n_val=5), train=config.TrainPart(epochs=1, l2=0.01))
    run, _ = config.run_config(plan, tmp_path / "run")
    file, fingerprint = run.path / "config.toml", run.fingerprint
    assert subject_of(run.path, None).task.objective.l2 == 0.01
    file.write_text(file.read_text().replace("0.01", "0.03"))
    assert [str(file) in told and "was changed" in told for told in lo.check_run(run.path)] == [True]
    with refused(lo.RunError, "config-changed", "config.toml"):
        subject_of(run.path, None)
    rewritten(run.path, config_crc32=None)  # as in runs of earlier versions
    assert lo.check_run(run.path) == []
    assert lo.open_run(run.path).fingerprint == fingerprint
    file.unlink()
    assert lo.check_run(run.path) == []


# Runs by strangers: right checksums, wrong contents


def rewritten(path: Path, **changes: object) -> None:
    told = unsealed(json.loads((path / MANIFEST).read_text()))
    write_json(path / MANIFEST, {**told, **changes})


STRANGE = [
    {"shards": [{"number": "../../etc/passwd", "steps": 1, "crc32": 0, "kept_crc32": 0}]},
    {"shards": [{"number": -1, "steps": 1, "crc32": 0, "kept_crc32": 0}]},
    {"shards": [{"number": 0, "steps": 10**15, "crc32": 0, "kept_crc32": 0}]},
    {"shards": [{"number": 0, "steps": True, "crc32": 0, "kept_crc32": 0}]},
    {"shards": [{"name": "../other/shard-00000.safetensors"}]},
    {"shards": {}},
    {"shards": [[1]]},
    {"rule": {"kind": "SGD", "groups": {"0.weight": -1}, "slots": ["param"]}},
    {"rule": {"kind": "SGD", "groups": {}, "slots": ["param"]}},
    {"rule": {"kind": "SGD", "groups": {"0.weight": 0}, "slots": ["exp_avg"]}},
    {"rule": {"kind": ["SGD"], "groups": {"0.weight": 0}, "slots": ["param"]}},
    {"rule": "SGD"},
    {"shapes": {}},
    {"shapes": {"0.weight": "33"}},
    {"dtypes": {"0.weight": "__import__('os').system('true')"}},
    {"constants": {"0.weight": "a"}},
    {"train_size": "all"},
    {"finished": "yes"},
    {"initial_crc32": None},
    {"format": [2]},
    {"note": "of somebody else"},
    {"shards": [{"number": 0, "steps": 10**30, "crc32": 0, "kept_crc32": 0}]},
    {"shards": [{"number": n, "steps": 2**62, "crc32": 0, "kept_crc32": 0} for n in (0, 1)]},
    {"train_size": 10**30},
    {"config_crc32": "none"},
    {"dtypes": {name: [] for name in ("0.weight", "0.bias", "2.weight", "2.bias")}},
]


@pytest.mark.parametrize("changes", STRANGE, ids=lambda changes: str(changes)[:60])
def test_a_manifest_that_says_strange_things_is_refused(changes: dict, tmp_path: Path) -> None:
    run, task = recorded(tmp_path / "run", 0, 1)
    rewritten(run.path, **changes)
    with pytest.raises(lo.RunError):
        lo.SGDIE().score(lo.open_run(run.path, partial=True), task, data())
    assert lo.check_run(run.path)


def reshaped(run: lo.Run, **changes: torch.Tensor) -> None:
    """The first shard with other tensors, under a manifest that knows them."""
    entry = run.manifest.shards[0]
    file = run.path / entry.name
    tensors = {**load_file(file), **changes}
    write_tensors(file, tensors)
    claims = replace(entry, crc32=checksum(file), kept_crc32=tensor_checksum(tensors["kept"]))
    write_manifest(run.path, replace(run.manifest, shards=(claims, *run.manifest.shards[1:])))


ODD: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "complex states": lambda held: {"kept": held["kept"].to(torch.complex64)},
    "a table of states": lambda held: {"kept": held["kept"][None]},
    "lengths that wrap": lambda held: {"lengths": torch.tensor([2**63 - 1, 2**63 - 1, 2]), "ids": held["ids"][:0]},
    "lengths that wrap to their sum": lambda held: {
        "lengths": torch.tensor([2**63 - 1, 2**63 - 1, len(held["ids"]) + 2])
    },
    "complex hyperparameters": lambda held: {"hypers": held["hypers"].to(torch.complex64)},
    "negative epochs": lambda held: {"epochs": -held["epochs"] - 1},
}


@pytest.mark.parametrize("name", ODD)
def test_a_shard_with_strange_tensors_is_refused(name: str, tmp_path: Path) -> None:
    run, task = recorded(tmp_path / "run", 0, 1)
    reshaped(run, **ODD[name](load_file(run.path / shard_name(0))))
    with refused(lo.RunError, "run-damaged", shard_name(0)):
        lo.SGDIE().score(lo.open_run(run.path), task, data())
    assert lo.check_run(run.path)


def test_what_else_a_shard_holds_is_not_looked_at(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path / "run", 0, 1)
    whole = run.state(2)["param"]["0.weight"]
    reshaped(run, **{"state/param/of.another": torch.ones(1)})
    assert torch.equal(lo.open_run(run.path).state(2)["param"]["0.weight"], whole)
    assert lo.check_run(run.path) == []


@pytest.mark.parametrize("name", [MANIFEST, INITIAL, shard_name(0)])
def test_nobody_waits_for_a_pipe(name: str, tmp_path: Path) -> None:
    run, _ = recorded(tmp_path / "run", 0, 1)
    (run.path / name).unlink()
    os.mkfifo(run.path / name)
    with refused(lo.RunError, "manifest-unreadable" if name == MANIFEST else "run-damaged", name, "not a plain file"):
        lo.open_run(run.path).state(0)
    assert name in lo.check_run(run.path)[0]
    (tmp_path / "scores").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "scores")
    for kind, code in (
        (lo.Scores, "scores-unreadable"),
        (lo.Check, "check-unreadable"),
        (lo.Curve, "curve-unreadable"),
    ):
        with refused(lo.RunError, code, "scores"):
            kind.load(tmp_path / "scores")


def test_a_run_in_the_old_format_is_refused_by_its_number(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path / "run", 0, 1)
    told = unsealed(json.loads((run.path / MANIFEST).read_text()))
    (run.path / MANIFEST).write_text(json.dumps({**told, "format": 1, "shards": [12]}))
    with refused(lo.RunError, "format-not-supported", "format 1"):
        lo.open_run(run.path)
