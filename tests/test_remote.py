"""Runs on shared storage are read through fsspec, and scored like those on disk."""

import pickle

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import leaveout as lo
from problems import recorded
from refusal import refused


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A problem whose run is also in fsspec's memory, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    problem = recorded(tmp_path / "run")
    memory = fsspec.filesystem("memory")
    memory.rm("/shared", recursive=True) if memory.exists("/shared") else None
    memory.put(str(tmp_path / "run"), "/shared", recursive=True)
    yield problem, memory
    memory.rm("/shared", recursive=True)


def test_a_run_is_read_from_where_it_is(tmp_path, shared):
    problem, memory = shared
    memory.pipe("/shared/notes.txt", b"not part of the run")
    expected = lo.SGDIE().score(problem.run, problem.task, problem.query)
    for address in ("memory://shared", f"file://{tmp_path / 'run'}"):
        run = lo.open_run(address)
        assert lo.SGDIE().score(run, problem.task, problem.query).values.equal(expected.values)
    assert not list((tmp_path / "cache").rglob("notes.txt"))


def test_it_is_fetched_once_and_anew_when_it_changed(tmp_path, shared):
    _, memory = shared
    first = lo.open_run("memory://shared")
    seen = {file.name: file.stat().st_mtime_ns for file in first.path.iterdir() if file.suffix == ".safetensors"}
    again = lo.open_run("memory://shared")
    assert {file.name: file.stat().st_mtime_ns for file in again.path.iterdir() if file.name in seen} == seen
    other = recorded(tmp_path / "other", seed=5)
    memory.rm("/shared", recursive=True)
    memory.put(str(tmp_path / "other"), "/shared", recursive=True)
    memory.pipe("/shared/manifest.json", memory.cat("/shared/manifest.json") + b"\n")
    moved = lo.open_run("memory://shared")
    assert moved.path != first.path
    name = next(iter(other.task.parameters()))
    assert moved.final()["param"][name].equal(other.run.final()["param"][name])


def test_a_file_that_was_cut_is_fetched_again(shared):
    shard = next(lo.open_run("memory://shared").path.glob("shard-*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    lo.open_run("memory://shared")
    assert shard.read_bytes() == whole


def test_a_file_that_was_damaged_is_fetched_again(shared):
    folder = lo.open_run("memory://shared").path
    for name in ("initial.safetensors", "shard-00000.safetensors"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        lo.open_run("memory://shared")
        assert (folder / name).read_bytes() == whole


def test_it_travels_as_its_address(tmp_path, shared):
    run = lo.open_run("memory://shared").head(2)
    sent = pickle.dumps(run)
    assert b"memory://shared" in sent
    assert len(pickle.loads(sent)) == len(run) == 2  # noqa: S301 - our own
    assert str(tmp_path / "run").encode() in pickle.dumps(shared[0].run)


@pytest.mark.parametrize(
    ("address", "error", "code", "words"),
    [
        ("memory://nowhere", lo.RunError, "run-not-found", "no manifest.json"),
        ("nosuch://place", lo.InputError, "address-not-reachable", "correct it, or install"),
    ],
)
def test_addresses_without_a_run_are_refused(shared, address, error, code, words):
    with refused(error, code, words):
        lo.open_run(address)


def test_a_run_that_may_not_be_read_is_refused(shared, monkeypatch):
    def forbidden(_system, path, **_options):
        raise PermissionError(f"not allowed: {path}")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", forbidden)
    with refused(lo.RunError, "run-not-fetched", "not allowed", "try again"):
        lo.open_run("memory://shared")
