"""The first steps of a run are exactly as many as were asked for, whichever states were kept."""

from pathlib import Path

import pytest
import torch

import leaveout as lo
from leaveout.evaluate.precision import Doubled
from leaveout.trajectory.trajectory import Trajectory
from problems import data_for, mostly_full
from refusal import refused
from test_trajectory import METHODS, kept


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
@pytest.mark.parametrize("steps", mostly_full([12, 10, 2], 10))
def test_a_head_has_the_steps_that_were_asked_for_and_the_scores_of_a_run_that_ended_there(
    steps: int, optimizer: str, tmp_path: Path
) -> None:
    whole, task = kept(tmp_path / "all", "all", optimizer=optimizer)
    some, _ = kept(tmp_path / "some", 5, optimizer=optimizer)
    query, expected, head = data_for("mlp", 3, 1), whole.head(steps), some.head(steps)
    assert len(head) == len(expected) == steps
    assert head.kept == [index for index in (0, 5, 10) if index <= steps]
    trajectory = Trajectory(head, task)
    for slot, params in whole.state(steps).items():
        for name, tensor in params.items():
            assert torch.allclose(trajectory.final()[slot][name], tensor, rtol=1e-12, atol=1e-14)
    indices = list(range(steps))
    assert [step.record.index for step in trajectory.forward()] == indices
    assert [step.record.index for step in trajectory.backward()] == indices[::-1]
    assert trajectory.recorded_step(steps - 1).record.index == steps - 1
    for method in METHODS:
        values, truth = (method.score(run, task, query).values for run in (head, expected))
        assert (values - truth).abs().max() <= 1e-10 * truth.abs().max()


def test_a_head_travels_and_is_interpolated_with_its_length(tmp_path: Path) -> None:
    run, task = kept(tmp_path / "run", 5)
    head = run.head(12)
    function, arguments = head.__reduce__()
    assert len(function(*arguments)) == 12
    rough = head.interpolated()
    assert (len(rough), len(rough.head(7)), len(rough.interpolated())) == (12, 7, 12)
    final = Trajectory(head, task).final()["param"]["0.weight"]
    assert torch.equal(Trajectory(rough, task).final()["param"]["0.weight"], final)
    assert len(Doubled(head, head.manifest.constants)) == 12
    assert len(run.head(100)) == len(run) == 18
    assert head.fingerprint not in (run.fingerprint, run.head(11).fingerprint)


def test_a_head_between_kept_states_is_checked_against_the_next_of_them(tmp_path: Path) -> None:
    run, task = kept(tmp_path / "run", 5)
    other = lo.Task(task.model, task.loss, task.train_set, l2=0.3)
    for head in (run.head(3), run.head(3).interpolated()):
        with refused(lo.MismatchError, "step-does-not-follow", "Step 4"):
            lo.SGDIE().score(head, other, task.train_set)


@pytest.mark.parametrize("steps", [0, -1])
def test_what_is_no_number_of_steps_is_refused(steps: int, tmp_path: Path) -> None:
    run, _ = kept(tmp_path / "run", 5, epochs=1)
    with refused(lo.InputError, "head-out-of-range"):
        run.head(steps)
