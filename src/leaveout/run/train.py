"""The built-in training loop: shuffled batches, recorded, resumable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from leaveout.compute.resources import Resources
from leaveout.errors import InputError, MismatchError, RunError, check_seed, is_whole
from leaveout.optim import Hyper
from leaveout.run.reader import Run
from leaveout.run.recording.recorder import Recorder
from leaveout.task.task import Task


def train(
    task: Task,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    batch_size: int,
    seed: int,
    out: str | Path,
    *,
    keep: str | int = "auto",
    resume: bool = False,
    resources: Resources | None = None,
) -> Run:
    """Train the task's model with shuffled batches and record the run.

    Args:
        task: model, loss and data; the model's parameters are trained in place.
        optimizer: a ``torch.optim`` optimizer over these parameters.
        epochs: how often every example is seen.
        batch_size: examples per step; the last batch of an epoch may be smaller.
        seed: for the shuffling.
        out: a new directory for the run.
        keep: which states go to disk, as for ``Recorder``.
        resume: continue where a run in ``out`` was cut short, with the same batches; the finished run is then the one
            that would have been recorded without the interruption. A run that is already finished is returned as is.
        resources: whether to show progress.
    """
    if not is_whole(epochs, 1) or not is_whole(batch_size, 1):
        raise InputError(
            f"epochs={epochs} and batch_size={batch_size} must both be whole numbers of at least 1.",
            code="epochs-not-a-count",
        )
    order = torch.Generator().manual_seed(check_seed(seed))
    plan = (
        (epoch, ids) for epoch in range(epochs) for ids in torch.randperm(task.size, generator=order).split(batch_size)
    )
    steps = epochs * -(-task.size // batch_size)
    with Recorder(out, task.model, optimizer, keep=keep, resume=resume) as recorder:
        if recorder.before is not None:
            _pass_over(recorder.before, plan, steps, recorder.hypers())
        for epoch, ids in (resources or Resources()).track(plan, steps - recorder.done, "training"):
            batch = task.read(ids.tolist())
            optimizer.zero_grad()
            losses = task.objective.live_losses(batch)
            if not bool(torch.isfinite(losses.detach()).all()):
                raise RunError(_not_finite(recorder.done, ids, losses.detach()), code="step-not-finite")
            losses.mean().backward()
            recorder.step(ids, batch, epoch=epoch)
            optimizer.step()
        return recorder.finish()


def _not_finite(step: int, ids: Tensor, losses: Tensor) -> str:
    example = int(ids[int((~torch.isfinite(losses)).nonzero()[0, 0])])
    return (
        f"Step {step} has no finite loss, that of example {example} is NaN or infinite: look at it, or lower the "
        "learning rate; the steps before it are kept."
    )


def _pass_over(run: Run, plan: Iterator[tuple[int, Tensor]], steps: int, hypers: list[Hyper]) -> None:
    """Skip the batches of the plan that are done; refuse to continue with other settings than the run began with."""
    done = (run.record(index) for index in range(len(run)))
    same = len(run) == steps if run.manifest.finished else len(run) <= steps
    if not same or not all(torch.equal(record.ids, ids) for record, (_, ids) in zip(done, plan, strict=False)):
        raise MismatchError(
            f"The run in {run.path} was started with other batches: give the epochs, batch_size, seed and training set "
            "that it was started with, or another directory.",
            code="batches-differ",
        )
    counted = run.rule.definition.counters
    for now, then in zip(hypers, run.record(len(run) - 1).hypers, strict=True):
        if changed := [name for name in then if name not in counted and now[name] != then[name]]:
            raise MismatchError(
                f"The run in {run.path} was started with {changed[0]}={then[changed[0]]:g}, not {now[changed[0]]:g}: "
                "give the optimizer that it was started with, or another directory.",
                code="optimizer-differs",
            )
