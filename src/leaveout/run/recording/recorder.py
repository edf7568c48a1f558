"""Writes a run from an ordinary training loop, through the optimizer's own step hooks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from leaveout._util.trees import PARAM, State, nbytes
from leaveout._util.wrappers import bare
from leaveout.errors import LeaveoutWarning, is_whole
from leaveout.optim import Hyper, HyperReader, Settings, rule_of, unwrapped
from leaveout.run import uneven
from leaveout.run.gradient_states import StepGradients, step_gradients
from leaveout.run.model_match import described
from leaveout.run.record import Record
from leaveout.run.recording import failures
from leaveout.run.recording.keep import Storage
from leaveout.run.recording.last_state import LastState
from leaveout.run.recording.live_average import LiveAverage, NoAverage
from leaveout.run.recording.live_model import Frozen, Piece, check_gradients, check_modules, is_unmoved, state_of
from leaveout.run.recording.moving_buffers import MovingBuffers
from leaveout.run.recording.others import OtherOptimizers
from leaveout.run.recording.overwrite import clear
from leaveout.run.recording.pending import Pending
from leaveout.run.recording.problems import Problems
from leaveout.run.recording.processes import NEVER, NoWriter, processes_of
from leaveout.run.recording.resume import StepsOnDisk, check_restored, check_trained_alike, restore
from leaveout.run.recording.scaling import scale_of_step
from leaveout.run.recording.unfinished import check_unrecorded, end_earlier, until_finished
from leaveout.run.recording.watched_loader import IndexedLoader, IndexedLoaders, Watched, unwatched
from leaveout.run.recording.writer import Writer
from leaveout.task import batches

if TYPE_CHECKING:
    from leaveout.run.reader import Run


class Recorder:
    """Records a training run as it happens; the loop stays unchanged.

    Call ``finish`` after the loop, or put the loop inside ``with lo.Recorder(...) as recorder:``.

    Args:
        path: a new directory for the run.
        model: the ``nn.Module`` that the loop calls, which may come from ``torch.compile``.
        optimizer: one of ``leaveout.optim.optimizers()`` over its parameters, or a wrapper with it as ``.optimizer``.
        keep: which states go to disk: ``"all"``; every K-th, for a number K; or ``"auto"``, all of them until
            half of ``disk`` is used, and after that ever fewer. Others are recomputed when they are needed.
        disk: the budget for ``"auto"``, and for kept batches.
        keep_batches: store what the loader yields with the run, compressed; by default if the data set of a watched
            loader does not give the same examples twice (augmentation, random masking).
        average: the loop's ``torch.optim.swa_utils.AveragedModel`` (EMA, SWA), which it updates between steps, or the
            decay of an EMA that it updates in its own way after every step. ``score(at="average")`` scores it.
        overwrite: replace a run in the directory, with its scores, checks and report; a notebook cell may run again.
        resume: continue the run if the directory holds one that was cut short. Model and optimizer are restored to
            its last state, ``done`` says how many steps lead there, and ``watch`` skips their batches. The rest is the
            loop's own: seed the loader as before, and step a scheduler that steps with every batch ``done`` times.
            With a number of steps, the loop has restored both from a checkpoint after that many; later ones go.
        on_full: when the disk is full, ``"stop"`` raises at the next step, ``"continue"`` warns and trains on
            unrecorded. Either way, the run up to then can be read and resumed.
        on_problem: ``"warn"`` of what keeps the run from being scored, as soon as it is seen, or ``"stop"`` there.

    Every ``optimizer.step()`` is one step of the run; its micro-batches are those that ``watch`` yielded since the
    step before, or the ids passed to ``step``. Modes, random generators and moving buffers are recorded as well.
    """

    def __init__(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        keep: str | int = "auto",
        disk: str | int = "2GB",
        keep_batches: bool | None = None,
        average: AveragedModel | float | None = None,
        resume: bool | int = False,
        overwrite: bool = False,
        on_full: str = "stop",
        on_problem: str = "warn",
    ) -> None:
        failures.check_on_full(on_full)
        optimizer = unwrapped(optimizer)
        if overwrite or resume:
            end_earlier(path)
        check_unrecorded(optimizer)
        called, model = model, bare(model)
        rule = rule_of(optimizer, model).averaging(on=average is not None)
        self._average = NoAverage() if average is None else LiveAverage(average, model)
        self._processes = processes_of(called, resume=bool(resume))
        writes = self._processes is None or self._processes.first
        self._storage = Storage(keep if writes else NEVER, disk, rule)
        self._keep_batches = keep_batches
        self.problems = Problems(on_problem)
        check_modules(called)
        self._rule, self._model, self._optimizer = rule, model, optimizer
        self._params: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if n in rule.groups}
        self._hypers = HyperReader(optimizer, rule, self._params)
        self._frozen = Frozen(model, self._params)
        self._stop_when_full = on_full == "stop"
        if overwrite and writes:
            clear(path)
        at = None if isinstance(resume, bool) else resume
        self._writer = Writer(path, resume=bool(resume), steps=at) if writes else NoWriter(path)
        self._start: State | None = None
        self._settings, self._steps, self._epoch = Settings([]), 0, -1
        self._cut = self._full = self._closure = False
        self._loaders = IndexedLoaders()
        self._on_disk = StepsOnDisk(self.before if at is None else None)
        self._moving = MovingBuffers(model, self._params, self.before)
        if self.before is not None:
            self._take_up(self.before, restored=at is not None)
        self._pending = Pending(called, self._moving, self._writer.note, self._drawn_again, fresh=self.before is None)
        self._last = LastState(model, optimizer, self._params, self._state)
        self._forget = until_finished(self, self._writer, optimizer)
        self._others = OtherOptimizers(optimizer, self._params, self._moved_by_other, self._writer.note)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def done(self) -> int:
        """The number of recorded steps; right after ``resume=True``, of those that need not be taken again."""
        return self._steps

    @property
    def before(self) -> Run | None:
        """The run that is being resumed; None for a new one."""
        return self._writer.before

    def hypers(self) -> list[Hyper]:
        """Return every group's hyperparameters as the next step will use them."""
        return self._hypers.next().hypers

    def watch(self, loader: DataLoader | Watched) -> Watched:
        """Return the loader with the same batches, recording which examples each one holds; an iteration is an epoch.

        Watch it once before the loop over epochs, or again in each epoch; both work.
        """
        return Watched(self._loaders.of(unwatched(loader)), self._watched_epoch)

    def _watched_epoch(self, indexed: IndexedLoader) -> Iterator[Any]:
        self._epoch += 1
        try:
            for ids, batch in self._on_disk.beyond(indexed, self._epoch):
                if self._keep_batches is None:
                    self._keep_batches = indexed.gives_something_else(ids, batch)
                if self._hooks:
                    self._on_disk.restore_generators()
                    self._pending.watch(ids, batch)
                yield batch
        except BaseException:  # the loop was left early: the next step may still use the current batch, no later one
            self._pending.leave()
            raise

    def step(
        self,
        ids: Sequence[int] | Tensor,
        batch: Any = None,
        *,
        epoch: int = 0,
        denominator: float | None = None,
        autocast: str | None = None,
    ) -> Callable[[], None]:
        """Say which examples the next ``optimizer.step()`` uses, for loops without a watched loader.

        Call it once per micro-batch if gradients are accumulated. ``denominator`` is what the sum of losses was
        divided by, if the task cannot know; ``autocast`` the dtype of casts, if the model is not called as a whole.
        The returned function takes this back: call it before the step if the batch has no gradient after all.
        """
        numbers = batches.numbers(ids)
        if not is_whole(epoch, 0, 2**63 - 1):
            raise failures.not_an_epoch(epoch)
        self._epoch = int(epoch)
        if not self._hooks:
            return lambda: None  # the disk is full, or the run is finished
        self._on_disk.restore_generators()
        return self._pending.add(numbers, batch, denominator, autocast)

    def called_otherwise(self) -> None:
        """Say that the task will call the model in another way: its current autograd functions do not matter."""
        self._pending.skip_check()

    def takes_loaders_batches(self) -> None:
        """Say that the batches given to ``step`` are those of a loader, which do not depend on the parameters."""
        self._pending.from_loader = True

    def flush(self) -> None:
        """Write what is recorded so far; call it at each checkpoint, so that ``resume=steps`` can continue from it."""
        if not self._hooks or self._steps == 0:
            return
        self._settle()
        state = self._last.final()
        try:
            if self._writer.flush(state) and state is not None:
                self._storage.note(self._steps, nbytes(state))
        except OSError as error:
            self._give_up(error)

    def finish(self) -> Run:
        """Write what is left, release the optimizer, and return the run."""
        recording = bool(self._hooks)
        self._release()
        if self._steps == 0 and (self._cut or not self._full):
            self._writer.abandon()
            raise failures.nothing_recorded(self._others.kind)
        if self._cut:
            raise failures.cut_short(self._steps - 1)
        if recording:
            self._close(complete=True)
        self.problems.remind()
        if self._processes is not None:
            self._processes.wait()
        from leaveout.run.reader import open_run  # reading is no part of recording

        return open_run(self._writer.path, partial=self._full)

    def __reduce__(self) -> tuple:
        raise failures.not_copied()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._hooks:
            self._release()
            self._cut = kind is not None
            self._close(complete=not self._cut and self._steps > 0)

    def _take_up(self, run: Run, *, restored: bool) -> None:
        """Continue a run: restore everything to where it was cut short, or check that the loop has done so."""
        try:
            check_trained_alike(run, self._model, self._params, self._rule)
            if restored:
                check_restored(run, self._state())
            else:
                restore(run, self._model, self._optimizer, self._params, self._rule)
                self._average.restore(run)
        except BaseException:
            self._writer.abandon()
            raise
        self._storage.resume(run)
        self._moving.decide()
        self._steps, self._loaders.size = len(run), run.manifest.train_size

    def _close(self, *, complete: bool) -> None:
        if self._on_disk.finished:
            self._writer.abandon()
            return
        has_new_steps = self._steps > (0 if self.before is None else len(self.before))
        self._settle()
        final = self._last.final() if complete and has_new_steps else None
        lost = complete and has_new_steps and final is None and self._writer.newest is None
        self._cut |= lost
        try:
            self._writer.finish(final, complete=complete and not self._cut)
        except OSError as error:
            self._give_up(error)
        if lost:
            raise failures.last_state_lost(self._steps - 1)

    def _give_up(self, error: OSError) -> None:
        """Stop recording because the disk takes no more; what is written stays."""
        self._hooks = []  # not removed: torch may be iterating over them; they now do nothing
        self._release()
        self._pending.clear()
        self._writer.abandon()
        self._full = True
        message = failures.not_written(self._writer.path, error)
        if self._stop_when_full:
            self._cut = True
            raise failures.stopped(message, error) from error
        warnings.warn(f"{message}; training continues without being recorded.", LeaveoutWarning, stacklevel=2)

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._loaders.release()
        self._last.release()
        self._pending.release()
        self._others.release()
        self._forget()
        self._hooks = []

    def _drawn_again(self) -> None:
        if self._last.drifts():
            self.problems.say(failures.moved_without_step(self._rule.kind))

    def _moved_by_other(self, kind: str, name: str) -> None:
        """Say that another optimizer has moved one of the parameters; a run that has begun ends here."""
        if (begun := self._steps > 0) and not self._last.drifts():
            return
        if begun:
            self._release()
            self._full = True
            self._close(complete=False)
        self._pending.clear()  # they were the other one's
        self.problems.say(failures.other_optimizer(self._steps, self._rule.kind, kind, name), lasting=begun)

    def _before_step(self, _optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self._hooks:
            return
        where = f"At step {self._steps}"
        if self._on_disk.finished:
            raise failures.finished(self._writer.path)
        if not self._pending:
            raise failures.batch_missing(where)
        closure = any(callable(argument) for argument in (*args, *kwargs.values()))
        self._frozen.check(where)
        if not closure:
            check_gradients(where, self._params)
        if self._last.changed():
            raise failures.parameters_changed(where, self._steps - 1)
        self._moving.check(where)
        self._settle()
        self._settings = self._hypers.next(gradients=not closure)
        self._closure, self._scale = closure, scale_of_step(self._pending.autocast)
        if not closure:
            self._settings = uneven.with_places(self._settings, self._rule, self._params)
        if self._steps == 0 and closure:
            if self._pending.untouched:
                self._moving.begin()
            self._start = self._state()
        elif self._steps == 0:
            self._begin(self._state())

    def _begin(self, start: State) -> None:
        """Write what the run starts from; the forward passes of its first step are already done."""
        moving = self._moving.decide()
        if self._processes is not None and moving:
            raise failures.buffers_apart(next(iter(moving)))
        averaged = self._average.follow(self._params, moving)
        start = {**start, PARAM: {**start[PARAM], **self._moving.start()}, **self._average.state()}
        self._storage.begin(start)
        self._pending.begin(start[PARAM])
        manifest = described(self._model, self._rule, self._params, moving, self._loaders.size)
        try:
            self._writer.begin(replace(manifest, averaged=averaged), start)
        except OSError as error:
            self._give_up(error)

    def _after_step(self, _optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict[str, Any]) -> None:
        if not self._hooks or (not self._pending and is_unmoved(f"At step {self._steps}", self._params)):
            return
        total, copied = self._last.total()  # one check per step: a sum is finite only if all its terms are
        if not math.isfinite(total.item()):
            self._stop_at_nan()
        if self._start is not None:
            self._begin(self._start)
            self._start = None
        if self._closure:  # its gradients exist only now
            check_gradients(f"At step {self._steps}", self._params)
            self._settings = uneven.with_places(self._settings, self._rule, self._params)
        self._moving.settle()
        inputs = self._pending.take(keep_batches=bool(self._keep_batches))
        if self._processes is not None:
            inputs = self._processes.gathered(inputs)
        record = Record(self._steps, self._epoch, **self._settings._asdict(), **inputs._asdict(), scale=self._scale)
        self._steps += 1
        batch_bytes = self._storage.batches(record.batches, self._steps)
        given = partial(step_gradients, self._params, self._moving.now, alike=self._settings.places is None)
        state, state_bytes = self._storage.state(self._steps, given, record.hypers, partial(self._state, copied))
        self._last.note(total, None if isinstance(state, StepGradients) else state)
        try:
            self._writer.append(record, state, batch_bytes + state_bytes)
        except OSError as error:
            self._give_up(error)
        self._average.stepped()
        self.problems.say(self._pending.problem() if self._steps == 1 else None)

    def _settle(self) -> None:
        """Record what the loop has done since the last step: to its gradients, and to its average."""
        if self._writer.settle(self._last.final):
            self._storage.note_in_place_writes()
        update = self._average.updates(first=self._steps == 0)
        late = update and self._steps and not self._writer.amend(update, self._average.state())
        if update and late and update.added:
            raise failures.average_late(self._steps - 1)

    def _stop_at_nan(self) -> None:
        broken = [name for name, param in self._params.items() if not torch.isfinite(param).all()]
        if broken:  # otherwise they are large finite values whose sum overflows
            self.__exit__(FloatingPointError)
            raise failures.not_finite(self._steps, broken[0], *self._pending.broken())

    def _state(self, copied: Sequence[Piece] = ()) -> State:
        state = state_of(self._optimizer, self._rule, self._params, copied)
        state[PARAM] |= self._moving.now()
        return state | self._average.state()
