"""A Trainer that goes on from a checkpoint goes on with its run, also in a new process after the first was killed."""

from __future__ import annotations

import os
import signal
from multiprocessing import get_context

import pytest
import torch

import leaveout as lo

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from leaveout.integrations.transformers import RecorderCallback  # noqa: E402
from test_integrations_transformers import rows, trainer_of  # noqa: E402

CASE = "GPT-2, accumulated"  # 5 batches, 3 steps an epoch; dropout
EPOCHS, STEPS = 3, 9


class Dies(transformers.TrainerCallback):
    """Ends the process, or the training, after a step."""

    def __init__(self, step: int, *, process: bool) -> None:
        self._step, self._process = step, process

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == self._step:
            if self._process:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt


def trainer_in(folder, recorder=None, dies: Dies | None = None, **args):
    options = {"output_dir": str(folder / "out"), "save_strategy": "steps", "save_steps": 2, "num_train_epochs": EPOCHS}
    callbacks = [one for one in (recorder, dies) if one is not None]
    query = {"eval_dataset": rows("causal", 4, seed=9)} if "eval_strategy" in args else {}
    return trainer_of(CASE, callbacks=callbacks, args={**options, **args}, **query)


def killed(folder, step: int, **options) -> None:
    def train() -> None:
        torch.set_num_threads(1)  # threads do not survive a fork
        recorder = RecorderCallback(folder / "run", **options)
        trainer_in(folder, recorder, Dies(step, process=True)).train()

    process = get_context("fork").Process(target=train)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def whole(folder, args=None, **options):
    recorder = RecorderCallback(folder / "whole", **options)
    trainer = trainer_in(folder / "undisturbed", recorder, **(args or {}))
    trainer.train()
    return recorder, trainer.model


def check_same(run: lo.Run, other: lo.Run) -> None:
    """Every step and every state that both have, bit for bit."""
    assert len(run) == len(other) == STEPS
    for index in sorted({*run.kept} & {*other.kept}):
        a, b = run.state(index), other.state(index)
        assert all(torch.equal(a[slot][name], b[slot][name]) for slot in a for name in a[slot])
    for index in range(STEPS):
        a, b = run.record(index), other.record(index)
        assert torch.equal(a.ids, b.ids)
        assert (a.epoch, a.hypers, a.fingerprint, a.training) == (b.epoch, b.hypers, b.fingerprint, b.training)
        for one, two in zip(a.parts, b.parts, strict=True):
            assert (one.length, one.denominator) == (two.length, two.denominator)
            assert torch.equal(one.random["cpu"], two.random["cpu"])


@pytest.mark.parametrize(("step", "keep"), [(5, "all"), (7, 4)])  # checkpoints in the middle and at the end of an epoch
def test_a_killed_training_goes_on_in_another_process(step: int, keep, tmp_path) -> None:
    killed(tmp_path, step, keep=keep)
    recorder = RecorderCallback(tmp_path / "run", keep=keep)
    trainer = trainer_in(tmp_path, recorder)
    trainer.train(resume_from_checkpoint=True)
    other, model = whole(tmp_path, keep=keep)
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), model.parameters(), strict=True))
    check_same(recorder.run, other.run)
    assert lo.check_run(recorder.run.path) == []
    lo.SGDIE().score(recorder.run, recorder.task(check=False), rows("causal", 4, seed=9))


def test_an_interrupted_training_goes_on_in_the_same_process(tmp_path) -> None:
    """As in a notebook: with a new callback for the directory, or with the same one."""
    trainer = trainer_in(tmp_path, RecorderCallback(tmp_path / "run"), Dies(5, process=False))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    recorder = RecorderCallback(tmp_path / "run")
    trainer = trainer_in(tmp_path, recorder, Dies(7, process=False))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=True)
    trainer.remove_callback(Dies)
    trainer.train(resume_from_checkpoint=True)
    check_same(recorder.run, whole(tmp_path)[0].run)


def test_going_on_from_an_earlier_checkpoint_drops_what_came_later(tmp_path) -> None:
    first = RecorderCallback(tmp_path / "run", overwrite=True)
    trainer_in(tmp_path, first).train()
    recorder = RecorderCallback(tmp_path / "run", overwrite=True)  # which is for a training that begins
    trainer_in(tmp_path, recorder).train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    check_same(recorder.run, whole(tmp_path)[0].run)


def test_a_training_whose_beginning_was_not_recorded(tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer_in(tmp_path, None, Dies(5, process=False)).train()
    recorder = RecorderCallback(tmp_path / "run")
    with pytest.warns(lo.LeaveoutWarning, match="after 4 steps"):
        trainer_in(tmp_path, recorder).train(resume_from_checkpoint=True)
    assert len(recorder.run) == STEPS - 4
    assert recorder.run.record(0).epoch == 1
    lo.SGDIE().score(recorder.run, recorder.task(check=False), rows("causal", 4, seed=9))


def test_checkpoints_that_an_evaluation_decides_on(tmp_path) -> None:
    best = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    trainer = trainer_in(tmp_path, RecorderCallback(tmp_path / "run"), Dies(5, process=False), **best)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    recorder = RecorderCallback(tmp_path / "run")
    trainer_in(tmp_path, recorder, **best).train(resume_from_checkpoint=True)
    check_same(recorder.run, whole(tmp_path, best)[0].run)
