"""A sweep that is killed is taken up where it last noted how far it was, and ends with the same scores, bit for bit."""

import pytest
import torch

import leaveout as lo
from leaveout._util.files import read_sealed, save_sealed
from leaveout.sweep import checkpoint
from leaveout.trajectory.trajectory import Trajectory
from problems import recorded, shuffled
from test_shards import killed_until_done, timed

SWEEPS = {
    "SGD-IE": lo.SGDIE(),
    "TracIn": lo.TracIn(),
    "ACC": lo.ACC(),
    "ACC(sketch)": lo.ACC(sketch=5),
    "ACC, some corrected": lo.ACC(probability=0.5),
}
STEPS = 12


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Notes after every step."""
    monkeypatch.setattr(checkpoint, "EVERY", 0.0)
    monkeypatch.setattr(checkpoint, "SHARE", 0)


@pytest.fixture(scope="module", params=["mlp momentum", "mlp sgd", "conv momentum"])
def problem(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "run"
    return recorded(path, *request.param.split(), n=9, batches=shuffled(9, 3, STEPS // 3))


def scored(problem, method: str, work=None, **asked) -> lo.Scores:
    resources = lo.Resources(work=work)
    return SWEEPS[method].score(problem.run, problem.task, problem.query, resources=resources, **asked)


class StoppedError(Exception):
    pass


def stop_after(monkeypatch, notes: int) -> None:
    """The process would be killed right after so many notes."""
    write = checkpoint.save_sealed
    left = [notes]

    def counted(*given):
        write(*given)
        left[0] -= 1
        if left[0] == 0:
            raise StoppedError

    monkeypatch.setattr(checkpoint, "save_sealed", counted)


@pytest.mark.parametrize("method", SWEEPS)
def test_a_sweep_is_taken_up_where_it_was(tmp_path, problem, method, monkeypatch):
    whole = scored(problem, method)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(StoppedError):
            scored(problem, method, tmp_path)
    (file,) = tmp_path.glob("*.mark")
    _, told = read_sealed(file)
    assert told["step"] in (STEPS - 5, STEPS - 6)  # nothing is noted before the first correction
    again = []
    with monkeypatch.context() as patch:
        step = Trajectory._recorded_step
        patch.setattr(Trajectory, "_recorded_step", lambda self, i, *states: again.append(i) or step(self, i, *states))
        after = scored(problem, method, tmp_path)
    assert after.values.equal(whole.values)
    assert (after.cost.hvps, after.cost.gradients) == (whole.cost.hvps, whole.cost.gradients)
    assert STEPS - 2 not in again, "a step that was done was done again"
    assert not list(tmp_path.glob("*.mark"))


@pytest.mark.parametrize("method", ["SGD-IE", "ACC"])
def test_killed_sweeps_end_the_same(tmp_path, problem, method):
    whole = scored(problem, method, tmp_path / "undisturbed")
    taken = timed(lambda: scored(problem, method, tmp_path / "timed"))
    kills = killed_until_done(lambda: scored(problem, method, tmp_path / "work"), taken, 3)
    assert kills >= 1
    assert scored(problem, method, tmp_path / "work").values.equal(whole.values)


@pytest.mark.parametrize("harm", ["cut", "another's"])
def test_a_mark_that_is_not_right_is_not_used(tmp_path, problem, harm, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(StoppedError):
            scored(problem, "SGD-IE", tmp_path)
    (file,) = tmp_path.glob("*.mark")
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        tensors, told = read_sealed(file)
        save_sealed(file, {key: 2 * tensor for key, tensor in tensors.items()}, {**told, "file": "another.mark"})
    assert scored(problem, "SGD-IE", tmp_path).values.equal(scored(problem, "SGD-IE").values)


def test_no_work_directory_no_notes(tmp_path, problem, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "save_sealed", None)
    assert torch.isfinite(scored(problem, "ACC").values).all()
