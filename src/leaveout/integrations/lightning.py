"""Records a run of a Lightning ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from leaveout.errors import RunError, UnsupportedError
from leaveout.integrations.model_loss import undisturbed
from leaveout.integrations.step_loss import (
    StepCall,
    StepOutputs,
    StepPenalty,
    loss_of_step,
    module_of_step,
    rest_of_step,
    step_losses,
)
from leaveout.integrations.tap import NotedLoader, resumed
from leaveout.run.kept_batches import is_random
from leaveout.run.reader import Run
from leaveout.run.recording.recorder import Recorder
from leaveout.task import batches
from leaveout.task.task import Task
from leaveout.trajectory.proof import UNTRACED, first_step_problem

TRIAL = 8
"""How many examples are used to check that losses are taken per example."""


class RecorderCallback(Callback):
    """Records what a Lightning ``Trainer`` trains: ``Trainer(..., callbacks=[recorder])``, then ``recorder.run``.

    Args:
        path: a new directory for the run; or that of a run to resume, if ``fit`` is given a ``ckpt_path``.
        recorder_options: those of ``leaveout.Recorder``: ``keep``, ``disk``, ``keep_batches``, ``on_full``,
            ``overwrite``, ``on_problem``.

    After the first step, ``task()`` is made on trial, and that step computed again. If that fails, a warning says why
    and what ``task()`` has to be told, and recording goes on; with ``on_problem="stop"`` training ends there.

    One optimizer, one training loader, one process. Optimization may be automatic or manual. Whenever a checkpoint is
    saved, the run up to it is on disk; a training that resumes from the checkpoint also resumes the run.
    """

    def __init__(self, path: str | Path, **recorder_options: Any) -> None:
        self._path, self._options = Path(path), recorder_options
        self._recorder: Recorder | None = None
        self._run: Run | None = None
        self._module: LightningModule
        self._noted: NotedLoader | None = None
        self._settings: dict[str, Any] = {}
        self._convert: Any = None
        self._take_back: Callable[[], None] | None = None
        self._proven = False

    @property
    def run(self) -> Run:
        """The recorded run, once training has ended."""
        if self._run is None:
            raise RunError(
                "Training has not ended yet, so there is no run: call trainer.fit() first, with this callback among "
                "the Trainer's callbacks. (Of a training that ended with an error, open_run(path, partial=True) reads "
                "the steps that are on disk.)",
                code="training-not-ended",
            )
        return self._run

    def task(self, loss: nn.Module | Any = None, **options: Any) -> Task:
        """Return the task of the run: the module, a loss per example, the training set, collator and clipping.

        Args:
            loss: an ``nn`` loss module, or ``(outputs, targets) -> one loss per example``, where the outputs are what
                the module itself returns for the inputs. By default it is what ``training_step`` returns: the mean of
                a loss of ``torch.nn.functional``, taken per example. A penalty on the parameters that it adds to one
                such loss is taken as the task's ``penalty``. With manual optimization the loss must be given.
            options: those of ``leaveout.Task``.
        """
        _ = self.run
        return self._task(loss, options)

    def _task(self, loss: Any, options: dict[str, Any]) -> Task:
        assert self._noted is not None  # noqa: S101 - there is a run
        data, collate = self._noted.loader.dataset, Converted(self._noted.loader.collate_fn, self._convert)
        if loss is None and not self._module.automatic_optimization:
            raise UnsupportedError(
                f"{type(self._module).__name__} optimizes manually, so that training_step cannot be asked for its loss "
                "alone: give task(loss=...), a loss of what the module itself returns for its inputs, and clip_norm= "
                "or accumulation= where training_step clips or accumulates.",
                code="model-loss-unknown",
            )
        if loss is None:
            few = batches.read(data, range(min(TRIAL, batches.size(data))), collate)
            pair = batches.read(data, range(min(2, batches.size(data))), collate)
            loss, taken = _loss_of(self._module, few, pair)
            options = {**taken, **options}
        return Task(self._module, loss, data, **{"collate": collate, **self._settings, **options})

    def setup(self, trainer: Trainer, _module: LightningModule, stage: str) -> None:
        """Make the training loader, once it is built, record what it draws."""
        if stage != "fit":
            return
        if getattr(trainer, "overfit_batches", 0):
            raise UnsupportedError(
                "This training cannot be recorded: overfit_batches puts another sampler into the loader; use "
                "limit_train_batches.",
                code="training-not-supported",
            )
        source: Any = trainer.fit_loop._data_source
        given = source.dataloader

        def noted() -> Any:
            loader = given()
            if not isinstance(loader, DataLoader):
                raise UnsupportedError(
                    f"The training data is a {type(loader).__name__}: give one torch DataLoader.",
                    code="loader-expected",
                )
            if self._noted is None or self._noted.loader is not loader:
                self._noted = NotedLoader(loader)
            return loader

        source.dataloader = noted

    def on_fit_start(self, trainer: Trainer, _module: LightningModule) -> None:
        """Refuse what cannot be recorded."""
        problems = []
        if trainer.world_size > 1:
            problems.append(f"it runs in {trainer.world_size} processes, of which only one is recorded; use devices=1")
        if len(trainer.optimizers) > 1:
            problems.append(f"it has {len(trainer.optimizers)} optimizers; train with one")
        if str(trainer.precision) == "16-mixed":
            problems.append("it uses mixed precision with scaled gradients (16-mixed); use bf16-mixed or 32-true")
        if problems:
            raise UnsupportedError(
                "This training cannot be recorded: " + "; ".join(problems) + ".", code="training-not-supported"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start recording."""
        assert self._noted is not None  # noqa: S101 - the loader exists by now
        loader, self._module = self._noted.loader, pl_module
        self._settings, self._convert = {}, trainer.precision_plugin.convert_input
        if pl_module.automatic_optimization:
            self._settings["accumulation"] = trainer.accumulate_grad_batches  # even if the last window is shorter
        if trainer.gradient_clip_val:
            by_value = trainer.gradient_clip_algorithm == "value"
            self._settings["clip_value" if by_value else "clip_norm"] = float(trainer.gradient_clip_val)
        options = resumed(self._path, self._options, trainer.global_step)
        if options.get("keep_batches") is None:
            options["keep_batches"] = is_random(loader.dataset, loader.collate_fn)
        self._recorder = Recorder(self._path, pl_module, trainer.optimizers[0], **options)
        self._recorder.takes_loaders_batches()

    def on_train_batch_start(self, trainer: Trainer, _module: LightningModule, batch: Any, _idx: int) -> None:
        """Tell the recorder which batch comes next."""
        if self._recorder is not None and self._noted is not None:
            cast = "bfloat16" if str(trainer.precision) == "bf16-mixed" else None
            take_back = self._recorder.step(self._noted.next(), batch, epoch=trainer.current_epoch, autocast=cast)
            self._take_back = take_back if self._module.automatic_optimization else None

    def on_after_backward(self, *_: Any) -> None:
        """Note that the batch has a gradient."""
        self._take_back = None

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Skip a batch for which ``training_step`` returned None."""
        if self._take_back is not None:
            self._take_back()
        self._take_back = None

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Do the same if the optimizer step comes later; prove the first step."""
        self.on_before_optimizer_step()
        recorder = self._recorder
        if recorder is None or self._noted is None or self._proven or recorder.done != 1 or recorder.before:
            return
        self._proven = True
        recorder.flush()
        loader, task_of = self._noted.loader, partial(self._task, None, dict(UNTRACED))
        recorder.problems.say(first_step_problem(self._path, task_of, loader.dataset, loader.collate_fn))

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        """End the run before averages take the place of the weights, and an epoch without steps follows."""
        averaging = (one for one in trainer.callbacks if isinstance(one, StochasticWeightAveraging))
        if any(trainer.current_epoch >= one.swa_end for one in averaging):
            self.on_train_end()

    def on_save_checkpoint(self, *_: Any) -> None:
        """Write the run to disk before the checkpoint, so that every checkpoint has its run."""
        if self._recorder is not None:
            self._recorder.flush()

    def on_exception(self, _trainer: Trainer, _module: LightningModule, exception: BaseException) -> None:
        """Leave the run as cut short; if the user interrupted the training, finish the run with its steps so far."""
        if isinstance(exception, KeyboardInterrupt):
            self.on_train_end()
        elif self._recorder is not None and self._noted is not None:
            self._noted.release()
            recorder, self._recorder = self._recorder, None
            recorder.__exit__(type(exception), exception, None)

    def on_train_end(self, *_: Any) -> None:
        """Finish the run."""
        if self._recorder is not None and self._noted is not None:
            self._noted.release()
            recorder, self._recorder = self._recorder, None
            self._run = recorder.finish()


class Converted:
    """A collator whose batches have the dtype that the Trainer gives them (``precision="64-true"``)."""

    def __init__(self, collate: Any, convert: Any) -> None:
        self._collate, self._convert = collate, convert

    def __call__(self, examples: list[Any]) -> Any:
        """Join examples into a batch, and convert it."""
        return self._convert(self._collate(examples))


def _loss_of(module: LightningModule, batch: Any, other: Any) -> tuple[Any, dict[str, Any]]:
    """Return the loss that ``training_step`` computes for examples, and the options of a task that go with it."""
    with undisturbed(module):
        added, again = (rest_of_step(module, one) for one in (batch, other))
        if not (isinstance(added, torch.Tensor) and bool((added != 0).any())):
            _check_mean(module, batch)
            found = module_of_step(module, batch)
            return (step_losses, {"forward": StepCall()}) if found is None else (found, {"forward": StepOutputs()})
        added, again = added.mean(), again.mean()
        found = module_of_step(module, batch, added)
    if found is not None and torch.allclose(added, again, rtol=1e-5, atol=0):
        return found, {"forward": StepOutputs(penalised=True), "penalty": StepPenalty(module, other)}
    why = "which depends on them" if found is not None else "which are not those of one function"
    raise UnsupportedError(
        f"{type(module).__name__}.training_step adds {float(added):.3g} to the losses of its examples, {why}: give "
        "task(loss=...), a loss of what the module itself returns for its inputs that has all that depends on the "
        "example, and penalty=, a function of the parameters, for the rest.",
        code="model-loss-unknown",
    )


def _check_mean(module: LightningModule, batch: Any) -> None:
    """Refuse a ``training_step`` whose loss is not the mean of per-example losses, and nothing else."""
    with undisturbed(module):
        own, each = loss_of_step(module, batch), StepCall()(module, batch)[0]
    count = len(batches.leaves(batch)[0])
    if own is None or each.shape != (count,) or not torch.allclose(each.mean(), own, rtol=1e-4, atol=1e-7):
        raise UnsupportedError(
            f"The loss that {type(module).__name__}.training_step returns is not the mean of a loss of "
            "torch.nn.functional: give task(loss=...), a loss of what the module itself returns for its inputs, and "
            "forward=... where batches are not (inputs..., targets).",
            code="model-loss-unknown",
        )
