"""Records a run of the Hugging Face ``Trainer``, its defaults included."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from leaveout._util.wrappers import ORIGINAL
from leaveout.errors import RunError, UnsupportedError
from leaveout.integrations.fused import FUSED, FusedCall, unfused
from leaveout.integrations.model_loss import (
    CURE,
    ITEMS,
    LABELS,
    ClassLoss,
    ModelCall,
    divides_by_items,
    found_loss,
)
from leaveout.integrations.skipping import Skipping
from leaveout.integrations.tap import Tap, is_given, resumed
from leaveout.run.kept_batches import is_random
from leaveout.run.reader import Run
from leaveout.run.recording.method_hook import MethodHook
from leaveout.run.recording.recorder import Recorder
from leaveout.run.recording.watched_loader import INNER
from leaveout.task import batches
from leaveout.task.task import Task
from leaveout.trajectory.proof import UNTRACED, first_step_problem

TRIAL = 16
"""How many examples are used to find out which loss a model has."""


CHECKPOINTING = "gradient_checkpointing"
"""The attribute of modules that compute activations again instead of holding them."""

_RECORDING: dict[Path, RecorderCallback] = {}
"""The callback that records into each directory."""


class RecorderCallback(TrainerCallback):
    """Records what a ``Trainer`` trains: ``Trainer(..., callbacks=[recorder])``, then ``recorder.run``.

    Args:
        path: a new directory for the run; or that of a run to resume, if the training resumes from a checkpoint.
        recorder_options: those of ``leaveout.Recorder``: ``keep``, ``disk``, ``keep_batches``, ``on_full``,
            ``overwrite``, ``on_problem``.

    After the first step, ``task()`` is made on trial, and that step computed again. If that fails, a warning says why
    and what ``task()`` has to be told, and recording goes on; with ``on_problem="stop"`` training ends there.

    Whenever a checkpoint is saved, the run up to it is on disk. ``trainer.train(resume_from_checkpoint=...)`` resumes
    the run from there, even in a new process after the first was killed, and drops later steps.

    A callback never sees the model's inputs. So the examples' ids come from the loader and are noted where the trainer
    takes the batch, in ``training_step``, however often that calls the model; a hook on the model notes the number of
    items that its loss is divided by.
    """

    def __init__(self, path: str | Path, **recorder_options: Any) -> None:
        self._path, self._options = Path(path), recorder_options
        self._recorder: Recorder | None = None
        self._run: Run | None = None
        self._hook: Any = None
        self._skipping: Skipping | None = None
        self._tap: Tap
        self._adapter: Any
        self._model: nn.Module
        self._args: Any
        self._trainer: Any
        self._current: tuple[Callable, tuple[Any, Any]] | None = None
        self._divides: bool | None = None
        self._items_given = self._fused = self._proven = False

    @property
    def run(self) -> Run:
        """The recorded run, once training has ended."""
        if self._run is None:
            raise RunError(
                "Training has not ended yet, so there is no run: call trainer.train() first, with this callback among "
                "the Trainer's callbacks."
                if self._recorder is None
                else "Training has not ended: where it was interrupted, recorder.finish() gives the run of its steps.",
                code="training-not-ended",
            )
        return self._run

    def finish(self) -> Run:
        """End the recording of a training that was interrupted (Ctrl-C, an error), and return the run of its steps."""
        self.on_train_end()
        return self.run

    def task(self, loss: Any = None, **options: Any) -> Task:
        """Return the task of the run: the model, its loss per example, the training set, collator and clipping.

        Args:
            loss: ``(logits, labels) -> one loss per example``, or (sums, counts); needed only if the model has a custom
                loss, or the Trainer a ``compute_loss_func``.
            options: those of ``leaveout.Task``.
        """
        _ = self.run
        _without_checkpointing(self._model)
        return self._task(loss, options)

    def _task(self, loss: Any, options: dict[str, Any]) -> Task:
        model: Any = self._model
        model = unfused(model) if self._fused else model
        loader = self._tap.loader
        collate = Collated(loader.collate_fn, _columns(loader.dataset))
        noise = float(getattr(self._args, "neftune_noise_alpha", None) or 0)
        own: Any = ModelCall(_needs_labels(model), noise)
        forward = options.pop("forward", None) or (FusedCall(own) if self._fused else own)
        if loss is None:
            loss = self._own_loss(model, loader.dataset, collate)
        clip = self._args.max_grad_norm
        accumulation = "sum" if self._items_given else "mean"
        if self._fused:
            accumulation = "window"
        return Task(
            model,
            loss,
            loader.dataset,
            forward=forward,
            **{
                "collate": collate,
                "clip_norm": clip if clip and clip > 0 else None,
                "accumulation": accumulation,
                **options,
            },
        )

    def on_train_begin(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        """Start recording."""
        problems = []
        if args.world_size > 1 or args.n_gpu > 1:
            problems.append("it runs on several devices, of which only one is recorded; train on one")
        if args.fp16 and args.device.type != "cpu":  # on a CPU, Trainer ignores it
            problems.append("it uses mixed precision with scaled gradients (fp16); use bf16 or float32")
        if problems:
            raise UnsupportedError(
                "This training cannot be recorded: " + "; ".join(problems) + ".", code="training-not-supported"
            )
        self._let_go()
        self._args, self._model = args, kwargs["model"]
        self._adapter = kwargs["train_dataloader"]
        if not isinstance(getattr(self._adapter, INNER, None), DataLoader):
            raise UnsupportedError(
                f"The batches of a {type(self._adapter).__name__} cannot be followed: let get_train_dataloader return "
                "what Trainer's own does.",
                code="loader-ids-unknown",
            )
        self._tap = Tap(getattr(self._adapter, INNER), int(state.epoch or 0))
        loader, options = self._tap.loader, resumed(self._path, self._options, state.global_step)
        if options.get("keep_batches") is None:
            options["keep_batches"] = is_random(loader.dataset, loader.collate_fn)
        self._recorder = Recorder(self._path, self._model, kwargs["optimizer"], **options)
        self._recorder.takes_loaders_batches()
        setattr(self._adapter, INNER, self._tap)
        if state.global_step > 0:
            self._skipping = Skipping(self._adapter, self._follow)
        self._trainer = _trainer_of(self)
        self._trainer.training_step = self._taking_batches(self._trainer.training_step)
        hook = MethodHook(self._before_forward)
        self._hook = self._model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)

    def on_step_end(self, *given: Any, **_: Any) -> None:
        """Prove the first step; write the run to disk before a checkpoint, so that every checkpoint has its run."""
        control = given[2]
        if self._recorder is None:
            return
        first = self._recorder.done == 1 and self._recorder.before is None and not self._proven
        if control.should_save or first:
            self._recorder.flush()
        if first:
            self._proven = True
            held = _without_checkpointing(self._model)
            loader = self._tap.loader
            task_of = partial(self._task, None, dict(UNTRACED))
            problem = first_step_problem(self._path, task_of, loader.dataset, loader.collate_fn)
            for module in held:
                setattr(module, CHECKPOINTING, True)
            self._recorder.problems.say(problem)

    def on_epoch_end(self, *given: Any, **more: Any) -> None:
        """Do the same at the end of an epoch."""
        self.on_step_end(*given, **more)

    def on_evaluate(self, args: Any, *_: Any, **__: Any) -> None:
        """Do the same if the evaluation decides whether a checkpoint is saved."""
        if self._recorder is not None and args.save_strategy == "best":
            self._recorder.flush()

    def on_save(self, *_: Any, **__: Any) -> None:
        """Do the same if another callback asked for the checkpoint."""
        if self._recorder is not None:
            self._recorder.flush()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Finish the run."""
        if self._recorder is not None:
            self._release()
            recorder, self._recorder = self._recorder, None
            self._run = recorder.finish()

    def _release(self) -> None:
        """Restore the model and the loader."""
        self._hook.remove()
        del self._trainer.training_step
        setattr(self._adapter, INNER, self._tap.loader)
        if self._skipping is not None:
            self._skipping.release()
        _RECORDING.pop(self._path.resolve(), None)

    def _let_go(self) -> None:
        """Mark a training that ended with an error, of this callback or one for the same directory, as cut short."""
        former = _RECORDING.get(self._path.resolve())
        if former is not None and former._recorder is not None:
            recorder, former._recorder = former._recorder, None
            former._release()
            recorder.__exit__(RuntimeError, None, None)
        _RECORDING[self._path.resolve()] = self

    def _follow(self, loader: Any) -> None:
        """Follow the batches of a loader that has the rest of an epoch."""
        inner = getattr(loader, INNER)
        setattr(loader, INNER, self._tap.over(inner))

    def _taking_batches(self, training_step: Callable) -> Callable:
        """Return the trainer's ``training_step``, with the batch that it gets told to the recorder first."""

        @wraps(training_step)
        def taking(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._take(inputs)
            return training_step(model, inputs, *args, **kwargs)

        return taking

    def _take(self, inputs: Any) -> None:
        """Tell the recorder which batch the trainer is about to train on: the next of the drawn ones."""
        following = self._tap.next()
        if following is None or not is_given(following[1], inputs):
            raise UnsupportedError(
                f"{type(self._trainer).__name__}.training_step gets batches that are not those of its loader, in their "
                "order, so that it is not known which examples they hold: record its loop with lo.Recorder, and call "
                "recorder.step(ids) for each batch.",
                code="loader-ids-unknown",
            )
        following = following[0], without_words(following[1])
        if self._recorder is not None:
            take_back = self._recorder.step(*following, epoch=self._tap.epoch)
            self._current = take_back, following

    def _before_forward(self, model: nn.Module, _args: tuple, inputs: Mapping[str, Any]) -> None:
        """Tell the recorder, before the first forward pass of a batch, what the sum of its losses is divided by."""
        if not torch.is_grad_enabled() or self._current is None or self._recorder is None:
            return
        (take_back, following), self._current = self._current, None
        if self._divides is None:
            self._divides = self._args.label_smoothing_factor > 0 or divides_by_items(model, inputs)
        self._items_given, self._fused = ITEMS in inputs, FUSED in inputs
        if self._fused:
            self._recorder.called_otherwise()
        if self._divides and self._items_given:
            take_back()
            items = float(torch.as_tensor(inputs[ITEMS]))
            self._recorder.step(*following, epoch=self._tap.epoch, denominator=items)

    def _own_loss(self, model: nn.Module, data: Dataset, collate: Any) -> Any:
        if getattr(self._args, "loss_type", "nll") != "nll":
            raise UnsupportedError(
                f"The loss {self._args.loss_type!r} of this trainer is not one that leaveout recognises: {CURE}",
                code="model-loss-unknown",
            )
        if getattr(self._args, "packing", False) or getattr(self._args, "padding_free", False):
            raise UnsupportedError(
                "This trainer joins examples into one row, in which none can be left out alone: train with "
                "packing=False and padding_free=False.",
                code="training-not-supported",
            )
        smoothing = self._args.label_smoothing_factor
        if smoothing:
            own: Any = self._model
            inner = own.get_base_model() if hasattr(own, "peft_config") else own
            names = {type(own).__name__, type(inner).__name__}
            return ClassLoss(bool(names & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())), smoothing)
        ids = range(min(TRIAL, batches.size(data)))
        device = next(model.parameters()).device
        return found_loss(model, batches.to(batches.read(data, ids, collate), device))


class Collated:
    """A collator that ignores columns that the training set does not have, such as the text of a query."""

    def __init__(self, collate: Any, columns: frozenset[str] | None) -> None:
        self._collate, self._columns = copy.copy(collate), columns

    def __call__(self, examples: list[Any]) -> Any:
        """Join examples into a batch, a plain dictionary."""
        if self._columns is not None:
            examples = [
                {name: value for name, value in example.items() if name in self._columns} for example in examples
            ]
        return batches.map_leaves(lambda leaf: leaf, without_words(self._collate(examples)))


def _trainer_of(callback: RecorderCallback) -> Trainer:
    """Return the trainer that is calling this callback, which gets everything of it but the trainer itself."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    raise UnsupportedError(
        "This training is not that of a transformers.Trainer, so its batches cannot be followed: record its loop with "
        "lo.Recorder.",
        code="training-not-supported",
    )


def without_words(batch: Any) -> Any:
    """Return a batch without the words in it, which collators add to say what its tensors are.

    >>> without_words({"modality": "text", "x": 1})
    {'x': 1}
    """
    if not isinstance(batch, Mapping):
        return batch
    return {name: value for name, value in batch.items() if not isinstance(value, str)}


def _columns(data: Any) -> frozenset[str] | None:
    if not isinstance(getattr(data, "column_names", None), list):
        return None
    example = data[0]  # a transform that is set on the data set may give other names than its columns have
    return frozenset(example) if isinstance(example, Mapping) else None


def _without_checkpointing(model: nn.Module) -> list[Any]:
    """Switch off gradient checkpointing, which Trainer switches on itself; return the modules that had it."""
    held = [module for module in model.modules() if getattr(module, CHECKPOINTING, False)]
    for module in held:
        setattr(module, CHECKPOINTING, False)
    return held


def _needs_labels(model: nn.Module) -> bool:
    """Say whether the model needs labels to return its outputs: as decoder inputs, or as a required argument."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return True
    asked = inspect.signature(getattr(model, ORIGINAL, model.forward)).parameters.get(LABELS)
    return asked is not None and asked.default is inspect.Parameter.empty
