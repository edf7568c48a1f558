"""Work that is killed goes on from what was finished, and ends with the same scores to the last bit."""

import os
import random
import signal
import time

import pytest
import torch
from torch import nn

import leaveout as lo
from commands import Shell, started
from leaveout.builtin import config
from leaveout.compute.jobs import _files
from problems import mostly_full, recorded, shuffled
from refusal import refused

ROUNDS = int(os.environ.get("LEAVEOUT_ROUNDS", "2"))
"""How often each kind of work is begun, killed again and again, and brought to its end."""

METHODS = {
    "replay": (lo.Replay(), {"displacements": True}),
    "exact ACC": (lo.ACC("exact"), {}),
    "SGD-IE": (lo.SGDIE(), {"queries": "each"}),
    "ACC": (lo.ACC(), {"queries": "each"}),
}


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("shards") / "run", "mlp", "momentum", n=9, batches=shuffled(9, 3, 1))


def in_child(work) -> int:
    """The pid of a process that does this and ends."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def ended(child: int, after: float) -> bool:
    """Whether the process came to its end within so many seconds; otherwise it is killed, without warning."""
    deadline = time.monotonic() + after
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            assert status == 0, "the work failed by itself"
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def timed(work) -> float:
    """Seconds that the work takes in a process of its own."""
    start = time.monotonic()
    assert ended(in_child(work), 60)
    return time.monotonic() - start


def killed_until_done(work, taken: float, seed: int) -> int:
    """Runs the work in processes that are killed at random moments until it is done; how many were killed."""
    chance = random.Random(seed)
    count = 0
    while not ended(in_child(work), chance.uniform(0, taken / 2) if count < 12 else 60):
        count += 1
    return count


@pytest.mark.parametrize("method", mostly_full(METHODS, "replay", "ACC"))
def test_killed_scoring_goes_on_and_ends_the_same(tmp_path, problem, method):
    estimator, asked = METHODS[method]

    def scored(work: str) -> lo.Scores:
        resources = lo.Resources(work=tmp_path / work, shard=1)
        return estimator.score(problem.run, problem.task, problem.query, resources=resources, **asked)

    whole = scored("undisturbed")
    taken = timed(lambda: scored("timed"))
    kills = 0
    for turn in range(ROUNDS):
        saved = tmp_path / f"scores-{turn}"
        kills += killed_until_done(lambda: scored(f"work-{turn}").save(saved, overwrite=True), taken, turn)  # noqa: B023
        after = lo.Scores.load(saved)
        assert after.values.equal(whole.values)
        if whole.displacements is not None:
            assert all(after.displacements[name].equal(moved) for name, moved in whole.displacements.items())
    assert kills >= ROUNDS


def test_killed_verify_goes_on_and_ends_the_same(tmp_path, problem):
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query)

    def verified(work: str) -> lo.Check:
        resources = lo.Resources(work=tmp_path / work, shard=1)
        return lo.verify(scores, problem.run, problem.task, problem.query, replays=8, resources=resources)

    whole = verified("undisturbed")
    taken = timed(lambda: verified("timed"))
    kills = sum(killed_until_done(lambda: verified(f"work-{turn}"), taken, turn) for turn in range(ROUNDS))  # noqa: B023
    assert kills >= ROUNDS
    for turn in range(ROUNDS):
        assert verified(f"work-{turn}").table.equals(whole.table)


@pytest.mark.parametrize("shuffles", mostly_full([0, 2], 2))
def test_killed_cleansing_goes_on_and_ends_the_same(tmp_path, problem, shuffles):
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query)

    def cleansed(work: str) -> lo.Curve:
        asked = {"random": 2, "shuffles": shuffles, "resources": lo.Resources(work=tmp_path / work, shard=1)}
        return lo.cleanse(scores, problem.run, problem.task, problem.query, [1, 2], **asked)

    whole = cleansed("undisturbed")
    taken = timed(lambda: cleansed("timed"))
    kills = sum(killed_until_done(lambda: cleansed(f"work-{turn}"), taken, turn) for turn in range(ROUNDS))  # noqa: B023
    assert kills >= ROUNDS
    for turn in range(ROUNDS):
        assert cleansed(f"work-{turn}").table.equals(whole.table)


def replay(problem, work, task=None, run=None, query=None, **other) -> lo.Scores:
    given = (run or problem.run, task or problem.task, query or problem.query)
    return lo.Replay(**other).score(*given, resources=lo.Resources(work=work, shard=2))


def test_a_finished_shard_is_not_done_again(tmp_path, problem):
    first = replay(problem, tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 5
    seen = {file: file.stat().st_mtime_ns for file in files}
    files[0].unlink()
    again = replay(problem, tmp_path)
    assert again.values.equal(first.values)
    changed = [file for file in files if file.stat().st_mtime_ns != seen[file]]
    assert changed == files[:1]


def test_shards_of_other_work_are_never_used(tmp_path, problem):
    """Another run, task, query, method or set of rows has other files; the same has the same."""
    replay(problem, tmp_path)
    count = len(list(tmp_path.iterdir()))

    def more() -> int:
        nonlocal count
        before, count = count, len(list(tmp_path.iterdir()))
        return count - before

    replay(problem, tmp_path)
    assert more() == 0
    replay(problem, tmp_path, weight=0.5)
    assert more() == 5
    replay(problem, tmp_path, ids=(3, 1))
    assert more() == 1
    replay(problem, tmp_path, query=torch.utils.data.Subset(problem.query, [0, 1]))
    assert more() == 5
    replay(problem, tmp_path, run=problem.run.head(2))
    assert more() == 5
    other = recorded(tmp_path.parent / "other", "mlp", "momentum", n=9, batches=shuffled(9, 3, 1, seed=1))
    replay(other, tmp_path)
    assert more() == 5
    for groups in ([[0, 1]], [[0, 1], [2]], [[0], [1, 2]]):
        swept = lo.SGDIE().score(
            problem.run, problem.task, problem.query, groups=groups, resources=lo.Resources(work=tmp_path)
        )
        assert swept.values.equal(lo.SGDIE().score(problem.run, problem.task, problem.query, groups=groups).values)
        assert more() == 1
    scaled = lo.Task(problem.task.model, lambda out, y: 2 * losses(out, y), problem.train)
    with refused(lo.MismatchError, "step-does-not-follow"):  # found out by computing, not hidden by a file
        replay(problem, tmp_path, task=scaled)


def test_shards_of_another_version_are_never_used(tmp_path, problem, monkeypatch):
    """An upgrade between a kill and a restart may round otherwise: half of each would be neither."""
    first = replay(problem, tmp_path)
    monkeypatch.setattr("leaveout.compute.jobs.code_version", lambda: "another")
    assert replay(problem, tmp_path).values.equal(first.values)
    assert len(list(tmp_path.iterdir())) == 10


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


def test_what_is_free_at_the_moment_does_not_move_the_shards(tmp_path, problem, monkeypatch):
    for free in (10**12, 1):
        monkeypatch.setattr("leaveout.compute.resources.free_memory", lambda *_: free)  # noqa: B023
        for bytes_each, rows in ((1, 2), (10**8, 2), (3 * 10**8, 1), (10**12, 1)):
            assert lo.Resources(work=tmp_path, shard=2).shard_size(bytes_each, 9) == rows
        replay(problem, tmp_path / "replayed")
        resources = lo.Resources(work=tmp_path / "swept")
        lo.SGDIE().self_influence(problem.run, problem.task, resources=resources)
    assert len(list((tmp_path / "replayed").iterdir())) == 5
    assert len(list((tmp_path / "swept").iterdir())) == 1
    assert lo.Resources("200MB", work=tmp_path, shard=9).shard_size(10**8, 9) == 2


def asked(problem) -> tuple:
    return problem.run, problem.task, problem.query


@pytest.mark.parametrize("harm", ["cut", "flipped", "emptied", "swapped"])
def test_damaged_shards_are_done_again(tmp_path, problem, harm):
    first = replay(problem, tmp_path)
    one, other = sorted(tmp_path.iterdir())[:2]
    content = bytearray(one.read_bytes())
    if harm == "flipped":
        content[-5] ^= 1
    elif harm == "swapped":
        content = bytearray(other.read_bytes())
    else:
        content = content[: len(content) // 2 if harm == "cut" else 0]
    one.write_bytes(content)
    assert replay(problem, tmp_path).values.equal(first.values)


def test_a_place_that_is_none_is_refused(tmp_path):
    (tmp_path / "file").write_text("here")
    with refused(lo.InputError, "work-not-a-directory"):
        _files(lo.Resources(work=tmp_path / "file"), ["a"])


@pytest.mark.full
def test_a_killed_command_goes_on(tmp_path, monkeypatch, capsys):
    """And takes its shards away when the scores are saved; on two processes the scores are the same."""
    model = config.Config(config.DataPart("digits", 700, 20), train=config.TrainPart(epochs=2, batch_size=20))
    for name in ("run", "undisturbed"):
        config.run_config(model, tmp_path / name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    process = started("score", "run", "--method", "replay", cwd=tmp_path)
    work = tmp_path / f"cache/leaveout/work/{lo.open_run(tmp_path / 'run').fingerprint:08x}"
    while len(list(work.glob("*/[!.]*"))) < 1:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    shards = {file: file.stat().st_mtime_ns for file in work.glob("*/[!.]*")}
    assert not list((tmp_path / "run").glob("scores/[!.]*"))
    process = started("score", "run", "--method", "replay", cwd=tmp_path)
    while process.poll() is None and len(list(work.glob("*/[!.]*"))) < len(shards) + 1:
        time.sleep(0.01)
    assert all(file.stat().st_mtime_ns == then for file, then in shards.items() if file.exists()), "done again"
    assert process.wait(timeout=120) == 0
    assert not work.exists()
    done = Shell(tmp_path, monkeypatch, capsys)("score", "undisturbed", "--method", "replay", "--processes", "2")
    assert done.code == 0, done.err
    one, other = (lo.Scores.load(tmp_path / name / "scores/replay.safetensors") for name in ("run", "undisturbed"))
    assert one.values.equal(other.values)
