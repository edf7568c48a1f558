"""Wherever shards of work are done, the scores are the same; a worker that dies is replaced, done work is not redone.

The cluster is a real one, started here with two workers and stopped at the end.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import every_kind
import leaveout as lo
from experiments.reproduce import runner
from experiments.reproduce.spec import Spec
from problems import mostly_full, recorded, shuffled
from refusal import refused

PARTS = 3


@pytest.fixture(scope="module")
def cluster():
    # Read when Ray is imported: this cluster listens on the loopback alone.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray = pytest.importorskip("ray", reason="the extra leaveout[ray] is not installed")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield lo.Ray()
    ray.shutdown()
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture(params=["local", "processes", "ray"])
def engine(request):
    if request.param == "ray":
        return request.getfixturevalue("cluster")
    return lo.Local(2) if request.param == "processes" else lo.Local()


METHODS = {
    "replay": (lo.Replay(), {}),
    "replay of groups": (lo.Replay(), {"groups": {"a": [0, 2], "b": [1], "c": [5, 3, 4]}, "displacements": True}),
    "exact ACC": (lo.ACC("exact", "exact"), {"displacements": True}),
    "SGD-IE forward": (lo.SGDIE(direction="forward"), {"queries": "each"}),
    "SGD-IE backward": (lo.SGDIE(direction="backward"), {"queries": "each"}),
    "ACC": (lo.ACC(readout="outputs"), {"queries": "each"}),
    "ACC, a sweep per query": (lo.ACC(direction="backward"), {"queries": "each"}),
}


def same(one: lo.Scores, other: lo.Scores, tolerance: float) -> bool:
    assert (one.train_ids, one.query_ids, one.method) == (other.train_ids, other.query_ids, other.method)
    pairs = [(one.values, other.values)]
    assert (one.displacements is None) == (other.displacements is None)
    pairs += [(tensor, other.displacements[name]) for name, tensor in (one.displacements or {}).items()]
    return all(float((a - b).abs().max()) <= tolerance * float(b.abs().max()) for a, b in pairs)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A problem, and every method's scores in one piece and in shards, all in this process."""
    path = tmp_path_factory.mktemp("engine") / "run"
    problem = recorded(path, "mlp", "momentum", n=7, batches=shuffled(7, 4, 2))

    def scored(resources: lo.Resources) -> dict[str, lo.Scores]:
        asked = (problem.run, problem.task, problem.query)
        return {
            name: estimator.score(*asked, resources=resources, **more) for name, (estimator, more) in METHODS.items()
        }

    return scored, scored(lo.Resources()), scored(lo.Resources(shard=PARTS))


@pytest.mark.parametrize("engine", ["processes", "ray"], indirect=True)
def test_scores_are_the_same_whatever_the_engine_and_the_shards(expected, engine):
    """To the last bit for shards of one size, and to 1e-12 of the largest in float64 for any."""
    scored, whole, cut = expected
    for name, found in scored(lo.Resources(shard=PARTS, engine=engine)).items():
        assert same(found, cut[name], 0), name
        assert same(found, whole[name], 1e-12), name
        assert found.cost.gradients == cut[name].cost.gradients >= whole[name].cost.gradients, name
        assert found.cost.hvps == cut[name].cost.hvps, name


def test_verify_and_cleanse_take_the_engine_along(tmp_path, engine):
    problem = recorded(tmp_path / "run", "mlp", "sgd", n=12)
    scores = lo.SGDIE().score(problem.run, problem.task, problem.query)
    asked = (scores, problem.run, problem.task, problem.query)
    here = lo.verify(*asked, replays=10, resources=lo.Resources(shard=PARTS))
    there = lo.verify(*asked, replays=10, resources=lo.Resources(shard=PARTS, engine=engine))
    assert here.table.equals(there.table)
    here, there = (
        lo.cleanse(*asked, [2, 4], random=2, resources=lo.Resources(shard=PARTS, engine=where))
        for where in ("local", engine)
    )
    assert here.table.equals(there.table)


@pytest.mark.parametrize("name", mostly_full(every_kind.KINDS, "together"))
@pytest.mark.parametrize("engine", ["processes", "ray"], indirect=True)
def test_runs_that_have_everything_are_scored_elsewhere(name, engine, tmp_path):
    """BatchNorm, dropout, kept batches, clipping, windows, freezing, averages, closures, casts: to the last bit."""
    kind = every_kind.KINDS[name]
    run = kind(tmp_path / "run").train().recorder.finish()
    run = run if kind.at is None else run.average()
    for method in (lo.Replay(), lo.SGDIE(direction="forward")):
        here, there = (
            method.score(run, kind.task(), kind.query(), resources=lo.Resources(shard=9, engine=where))
            for where in ("local", engine)
        )
        assert same(there, here, 0), method


def test_a_shortened_run_stays_short_elsewhere(tmp_path, engine):
    problem = recorded(tmp_path / "run", "logistic", "sgd")
    short = problem.run.head(3).interpolated()
    here = lo.Replay().score(short, problem.task, problem.query, resources=lo.Resources(shard=PARTS))
    there = lo.Replay().score(short, problem.task, problem.query, resources=lo.Resources(shard=PARTS, engine=engine))
    assert here.values.equal(there.values)
    assert not here.values.equal(lo.Replay().score(problem.run, problem.task, problem.query).values)


class Deadly:
    """Kills its own process at the third item, and notes on disk who was called with what.

    It dies only after the items of ``after`` have arrived, as files say: which worker is how far is nobody's promise.
    """

    def __init__(self, folder: Path, deaths: int, after: tuple[int, ...] = ()) -> None:
        self.folder, self.deaths, self.after = folder, deaths, after

    def __call__(self, item: int) -> int:
        died = len(list(self.folder.glob("death-*")))
        (self.folder / f"call-{item}-{time.monotonic_ns()}").touch()
        if item == 2 and died < self.deaths:
            patience = time.monotonic() + 60
            while not all((self.folder / f"seen-{i}").exists() for i in self.after):
                assert time.monotonic() < patience, "what was done did not arrive"
                time.sleep(0.01)
            (self.folder / f"death-{died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        return item * item


@pytest.mark.parametrize("engine", mostly_full(["processes", "ray"], "ray"), indirect=True)
def test_a_worker_that_dies_is_replaced(tmp_path, engine):
    function = Deadly(tmp_path, deaths=1, after=(0,))
    found = {}
    for item, square in lo.Resources(engine=engine).map(function, range(6), "squares"):
        found[item] = square
        (tmp_path / f"seen-{item}").touch()
    assert found == {i: i * i for i in range(6)}
    assert len(list(tmp_path.glob("death-*"))) == 1
    calls = {i: len(list(tmp_path.glob(f"call-{i}-*"))) for i in range(6)}
    assert calls[2] == 2
    assert calls[0] == 1, "what was done before the death was done again"


def died_once(folder: Path, item: int) -> int:
    """Kills its own process the first time that it is called with an even item."""
    if item % 2 == 0 and not (folder / str(item)).exists():
        (folder / str(item)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    return item


@pytest.mark.full
def test_deaths_are_counted_for_each_item(tmp_path, monkeypatch):
    monkeypatch.setattr("leaveout.compute.engines.RETRIES", 1)
    assert dict(lo.Local(2).run(partial(died_once, tmp_path), range(4))) == {i: i for i in range(4)}
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.full
@pytest.mark.parametrize("retries", [1, 2])
@pytest.mark.parametrize("engine", ["processes", "ray"], indirect=True)
def test_a_worker_that_always_dies_is_given_up(tmp_path, engine, retries, monkeypatch):
    monkeypatch.setattr("leaveout.compute.engines.RETRIES", retries)
    with refused(lo.EngineError, "worker-died", f"{retries + 1} times"):
        dict(lo.Resources(engine=engine).map(Deadly(tmp_path, deaths=99), [2], "squares"))
    assert len(list(tmp_path.glob("death-*"))) == retries + 1


RAYLET = """
import os, signal, time
from pathlib import Path
import ray
import leaveout as lo

quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 2}
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _system_config=quick)

def kill(item):
    parent = os.getppid()
    assert Path(f"/proc/{parent}/comm").read_text().strip() == "raylet"
    os.kill(parent, signal.SIGKILL)
    time.sleep(30)

try:
    dict(lo.Resources(engine="ray").map(kill, range(3), "deaths"))
except lo.EngineError as error:
    print("refused:", error.code, flush=True)
ray.shutdown()
"""


@pytest.mark.full
def test_a_dead_raylet_is_told():
    """In a process of its own, with a cluster of its own.

    Ray ends a process whose raylet is dead, without an exception and sometimes before there is a result, and on a
    machine that swaps it may wait for the dead one for ever: then again.
    """
    pytest.importorskip("ray", reason="the extra leaveout[ray] is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, "-c", RAYLET]
    for _ in range(4):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
        except subprocess.TimeoutExpired as late:
            done = subprocess.CompletedProcess(command, 1, (late.stdout or b"").decode(), "not done in 100 s")
        codes = re.findall(r"^refused: (.*)$", done.stdout, re.MULTILINE)  # Ray writes there too
        if codes or done.returncode == 0 or "Traceback" in done.stderr:
            break
    assert codes == ["cluster-lost"], (done.stdout[-1000:], done.stderr[-2000:])


@pytest.mark.parametrize("engine", ["processes", "ray"], indirect=True)
def test_cells_of_an_experiment_are_shared_out(tmp_path, engine):
    """Each is a file as soon as it is done, and done once."""
    resources = lo.Resources(engine=engine)
    count = runner.compute(SPEC, tmp_path, 3, resources=resources)
    files = sorted((tmp_path / "squares/cells").iterdir())
    assert count == len(files) == 3
    assert runner.compute(SPEC, tmp_path, 4, resources=resources) == 1
    rows = runner.finished(SPEC, tmp_path, 4)
    assert rows["square"].tolist() == [0, 1, 4, 9]
    assert os.getpid() not in rows["process"].tolist()


SPEC = Spec(
    "squares",
    "Squares of seeds",
    1,
    lambda seeds, _quick: [{"seed": seed} for seed in range(seeds)],
    lambda settings: [{"square": settings["seed"] ** 2, "process": os.getpid()}],
    lambda _rows: "",
    ("seed",),
)


def test_errors_come_back_as_they_are(tmp_path, engine):
    problem = recorded(tmp_path / "run", "logistic", "sgd")
    other = TensorDataset(problem.train.tensors[0] + 1, problem.train.tensors[1])
    task = lo.Task(problem.task.model, nn.BCEWithLogitsLoss(), other, l2=problem.task.objective.l2)
    with refused(lo.MismatchError, "batch-differs", "step 0"):
        lo.SGDIE().score(problem.run, task, problem.query, resources=lo.Resources(engine=engine))


@pytest.mark.parametrize("engine", ["processes", "ray"], indirect=True)
def test_what_cannot_be_sent_is_refused(engine):
    lock = threading.Lock()
    with refused(lo.EngineError, "work-not-sendable"):
        list(engine.run(lambda _: lock, range(2)))


def test_progress_is_that_of_all_workers(cluster, capsys, monkeypatch):
    monkeypatch.setattr("leaveout.compute.progress.MOMENT", 0.0)
    dict(lo.Resources(engine=cluster, progress=True).map(slept, range(5), "five naps"))
    shown = capsys.readouterr().err
    assert "five naps" in shown
    assert "5/5" in shown


def slept(_: int) -> None:
    time.sleep(0.1)


@pytest.mark.parametrize("engine", ["processes", "ray"], indirect=True)
def test_a_worker_is_given_the_number_of_threads(engine):
    for threads in (2, 3):
        torch.set_num_threads(threads)
        counts = dict(engine.run(lambda _: torch.get_num_threads(), range(2)))
        assert counts == {0: threads, 1: threads}


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"engine": "spark"}, "engine-unknown"),
        ({"shard": 0}, "shard-not-a-count"),
        ({"shard": "4"}, "shard-not-a-count"),
        ({"shard": 2.5}, "shard-not-a-count"),
        ({"shard": True}, "shard-not-a-count"),
        ({"work": 3}, "work-not-a-directory"),
        ({"memory": True}, "bytes-unreadable"),
        ({"memory": "9" * 400}, "bytes-unreadable"),
        ({"memory": "9" * 300 + "T"}, "bytes-unreadable"),
    ],
)
def test_resources_that_cannot_be_are_refused(arguments, code):
    with refused(lo.InputError, code, *arguments):
        lo.Resources(**arguments)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("count", [0, "2", 2.5, True, None])
def test_engines_that_cannot_be_are_refused(count):
    with refused(lo.InputError, "processes-not-a-count", "Local(processes="):
        lo.Local(count)
    if count != 2.5:  # processors may be shared
        with refused(lo.InputError, "cpus-not-positive", "Ray(cpus="):
            lo.Ray(cpus=count)
