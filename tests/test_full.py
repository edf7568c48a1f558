"""A disk that is full while a run is recorded: training stops or goes on, as asked, and what is there can be read."""

import resource
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import leaveout as lo
from leaveout.run.manifest import shard_name
from leaveout.sweep.free_transport import RowFile
from refusal import refused
from test_store import contents

# A process that may not write files beyond this size meets the same refusal as one on a full disk, without a mount.
LIMIT = 30_000
STEPS = 60


def train(path: Path, on_full: str, *, resume: bool = False, small: bool = True) -> dict:
    """Records steps in shards that grow; beyond the limit the disk takes no more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leaveout.run.recording.writer.SHARD_STEPS", 10 if small else 4096)
        return _train(path, on_full, resume=resume)


def _train(path: Path, on_full: str, *, resume: bool) -> dict:
    torch.manual_seed(0)
    model = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    told: dict = {"taken": 0, "warnings": [], "error": None, "finish": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with lo.Recorder(path, model, optimizer, keep=5, on_full=on_full, resume=resume) as recorder:
                for listen in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
                    listen(lambda *_: None)  # the recorder is not the only one
                for step in range(recorder.done, STEPS):
                    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(step))
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    # Batches grow and take room in their shard.
                    recorder.step(list(range(4 if step < 30 else 1000)))
                    optimizer.step()
                    told["taken"] += 1
                told["finish"] = len(recorder.finish())
        except lo.LeaveoutError as error:
            told["error"], told["code"] = str(error), error.code
    told["warnings"] = [str(w.message) for w in caught if issubclass(w.category, lo.LeaveoutWarning)]
    told["weights"] = model.weight.detach().flatten().tolist()
    return told


def limited(path: Path, on_full: str, limit: int = LIMIT, *, small: bool = True) -> dict:
    """The same with a limit on the size of files; Python ignores the signal, so that the write is refused."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        return train(path, on_full, small=small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit on the size of files")
@pytest.mark.parametrize("on_full", ["stop", "continue"])
def test_a_full_disk_stops_the_training_or_not_as_asked(on_full: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "stop")
    assert whole["taken"] == STEPS
    told = limited(tmp_path / "run", on_full)
    run = lo.open_run(tmp_path / "run", partial=True)
    assert len(run) == 30
    assert lo.check_run(tmp_path / "run") == []
    assert sorted(contents(run.path)) == sorted(
        ["manifest.json", "initial.safetensors", *(shard_name(i) for i in range(3))]
    )
    if on_full == "stop":
        assert 40 <= told["taken"] < STEPS
        assert told["code"] == "disk-full"
        assert "too large" in told["error"]
        assert "resume=True, or train on without recording by on_full='continue'" in told["error"]
        assert told["warnings"] == []
    else:
        assert told["error"] is None
        assert told["taken"] == STEPS
        assert told["weights"] == whole["weights"]  # the training is not disturbed
        assert told["finish"] == 30
        assert len(told["warnings"]) == 1
        assert "training continues without being recorded" in told["warnings"][0]
    again = train(tmp_path / "run", "stop", resume=True)  # there is room again
    assert again["taken"] == 30
    assert again["weights"] == whole["weights"]
    assert len(lo.open_run(tmp_path / "run")) == STEPS


@pytest.mark.parametrize("on_full", ["stop", "continue"])
def test_a_disk_that_is_full_at_the_end_or_from_the_beginning(on_full: str, tmp_path: Path) -> None:
    told = limited(tmp_path / "end", on_full, small=False)  # one shard, written by finish()
    assert told["taken"] == STEPS
    assert "no complete step on disk" in told["error"] if on_full == "continue" else "too large" in told["error"]
    told = limited(tmp_path / "begin", on_full, 100)
    # The first state is written while training goes on: it stops a few steps later.
    assert told["taken"] == STEPS if on_full == "continue" else told["taken"] < STEPS
    assert ("does not hold a run" if on_full == "continue" else "nothing is on disk yet; make room") in told["error"]
    assert len(told["warnings"]) == (on_full == "continue")


def test_parameters_that_are_nan_on_a_full_disk_are_still_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer, on_full="continue")

    def step(scale: float) -> None:
        (scale * model(torch.ones(1, 2))).sum().backward()
        recorder.step([0])
        optimizer.step()

    step(1.0)
    (tmp_path / "run" / shard_name(0)).mkdir()  # a file cannot be put in its place
    with (
        pytest.warns(lo.LeaveoutWarning, match="could not be written"),
        refused(lo.RunError, "step-not-finite", "Step 1"),
    ):
        step(float("nan"))


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit on the size of files")
def test_rows_in_a_file_are_written_whole_or_said_to_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    like = torch.zeros((), dtype=torch.float64)
    held = RowFile((3, 1, 1000), like)
    rows, values = torch.tensor([0, 2]), torch.randn(2, 1, 1000, dtype=torch.float64)
    held[rows] = values
    assert held[rows].equal(values)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))  # amid the second row
    try:
        with refused(lo.RunError, "temporary-file-failed", "TMPDIR"):
            held[torch.tensor([1])] = values[:1]
        with refused(lo.RunError, "temporary-file-failed", "TMPDIR"):
            RowFile((3, 1, 1000), like)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with refused(lo.RunError, "temporary-file-failed", "TMPDIR"):
        RowFile((3, 1, 1000), like)


def test_another_word_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with refused(lo.InputError, "on-full-unknown", "on_full='explode'", "'continue'"):
        lo.Recorder(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), on_full="explode")
    assert not (tmp_path / "run").exists()


def test_scores_that_cannot_be_written_say_so(tmp_path: Path) -> None:
    scores = lo.Scores(torch.ones(2, 1), (0, 1), ("mean",), "ACC")
    (tmp_path / "file").write_text("")
    with refused(lo.RunError, "file-not-writable"):
        scores.save(tmp_path / "file" / "scores")
