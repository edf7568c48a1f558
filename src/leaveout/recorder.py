"""Writes a run from an ordinary training loop, through the optimizer's own step hooks."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from leaveout import batches
from leaveout.errors import InputError, RunError, UnsupportedError
from leaveout.optim import Hyper, Rule, rule_of
from leaveout.resources import parse_bytes
from leaveout.store import Manifest, Record, Run, Writer, open_run
from leaveout.validate import module_problems
from leaveout.vectors import PARAM, State, nbytes, sum_of

_RECORDED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class Recorder:
    """Records a training run as it happens; the loop stays as it is.

    Args:
        path: a new directory for the run.
        model: any ``nn.Module``.
        optimizer: ``torch.optim.SGD``, ``Adam`` or ``AdamW`` over its parameters.
        keep: which states go to disk: ``"all"``; every K-th, for a number K; or ``"auto"``, all of them while they
            fit into ``disk``, and from then on so few that about √N of N are kept. States in between are computed
            again when they are needed, from the recorded batches.
        disk: the budget of ``"auto"``.

    Every ``optimizer.step()`` is one step of the run; its batch is the last one that ``watch`` gave, or the ids that
    ``step`` was told.
    """

    def __init__(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        keep: str | int = "auto",
        disk: str | int = "2GB",
    ) -> None:
        if optimizer in _RECORDED:
            raise RunError("This optimizer is being recorded already: call finish() on its recorder first.")
        rule = rule_of(optimizer, model)
        self._keep = Keep(keep, parse_bytes(disk, "disk"))
        _check_modules(model)
        self._rule = rule
        self._model = model
        self._optimizer = optimizer
        self._params = {name: p for name, p in model.named_parameters() if name in rule.groups}
        self._writer = Writer(path)
        self._pending: list[tuple[Tensor, list[tuple[int, int]]]] = []
        self._hypers: list[Hyper] = []
        self._steps = 0
        self._cut = False
        self._epoch = -1
        self._train_size: int | None = None
        self._twins: dict[int, tuple[DataLoader, DataLoader, deque[list[int]]]] = {}
        _RECORDED.add(optimizer)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def watch(self, loader: DataLoader) -> Iterator[Any]:
        """One epoch of the loader, batch for batch as it would give them, noting which examples each holds."""
        twin, drawn = self._twin(loader)
        self._epoch += 1
        drawn.clear()
        finished = False
        try:
            for batch in twin:
                ids = torch.tensor(drawn.popleft())
                self._pending.append((ids, batches.fingerprint(batch)))
                yield batch
            finished = True
        finally:
            if not finished:  # the loop was left early: the batch in hand will not be stepped on
                self._pending.clear()

    def step(self, ids: Sequence[int] | Tensor, batch: Any = None, *, epoch: int = 0) -> None:
        """Says which examples the coming ``optimizer.step()`` uses, for loops without a watched loader.

        The gradient must be that of the mean loss over exactly these examples; an accumulated one is, if every
        micro-batch's ids are given here together and the losses were averaged over all of them.
        """
        ids = torch.as_tensor(ids).cpu().clone()
        if len(ids.shape) == 1 and len(ids) and (ids.dtype.is_floating_point or ids.dtype == torch.bool):
            kind = str(ids.dtype).removeprefix("torch.")
            raise InputError(f"ids of type {kind} do not name a batch: give a list of example numbers.")
        ids = ids.long()
        if ids.ndim != 1 or len(ids) == 0:
            raise InputError(f"ids of shape {list(ids.shape)} do not name a batch: give a list of example numbers.")
        if int(ids.min()) < 0:
            raise InputError(f"Example number {int(ids.min())} is negative: ids count from 0 in the data set's order.")
        self._epoch = epoch
        self._pending.append((ids, [] if batch is None else batches.fingerprint(batch)))

    def finish(self) -> Run:
        """Writes what is left, lets go of the optimizer, and returns the run."""
        self._release()
        if self._cut:
            raise RunError(
                f"The run was cut short after step {self._steps - 1}: record it again, or use open_run(path, "
                "partial=True) for the steps that are there."
            )
        if self._steps == 0:
            raise RunError("Nothing was recorded: optimizer.step() was never called between Recorder() and finish().")
        self._writer.finish(self._state())
        return open_run(self._writer.path)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._hooks:
            return
        self._release()
        self._cut = kind is not None
        complete = not self._cut and self._steps > 0
        self._writer.finish(self._state() if complete else None, complete=complete)

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        _RECORDED.discard(self._optimizer)
        self._hooks = []

    def _twin(self, loader: DataLoader) -> tuple[DataLoader, deque[list[int]]]:
        """The loader again, with a sampler that notes what it draws; kept, so that its workers may persist."""
        if id(loader) not in self._twins:
            _check_loader(loader)
            size = batches.size(loader.dataset)
            if self._train_size not in (None, size):
                raise UnsupportedError(
                    f"This loader reads another data set ({size} examples, not {self._train_size}), so the numbers of "
                    "examples would be mixed up: put both into one ConcatDataset."
                )
            drawn: deque[list[int]] = deque()
            twin = copy.copy(loader)
            # DataLoader forbids setting these after construction; the copy has no iterator yet, so it is safe.
            attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
            twin.__dict__[attribute] = _NotingSampler(getattr(loader, attribute), drawn)
            twin.__dict__["_iterator"] = None
            self._twins[id(loader)] = (loader, twin, drawn)
            self._train_size = size
        return self._twins[id(loader)][1:]

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        where = f"At step {self._steps}"
        if any(callable(argument) for argument in (*args, *kwargs.values())):
            raise UnsupportedError(
                f"{where}, optimizer.step() was given a closure: compute the loss before and call step()."
            )
        if not self._pending:
            raise RunError(
                f"{where}, no batch is known: draw batches from recorder.watch(loader), or call recorder.step(ids) "
                "before each optimizer.step()."
            )
        if len(self._pending) > 1:
            raise UnsupportedError(
                f"{where}, {len(self._pending)} batches were drawn since the last one: gradient accumulation and "
                "skipped batches are not seen by watch(); iterate over the loader itself and call recorder.step(ids) "
                "with all the ids the mean loss was taken over."
            )
        trained = {n for n, p in self._model.named_parameters() if p.requires_grad}
        if changed := sorted(trained ^ set(self._params)):
            raise UnsupportedError(
                f"{where}, {changed[0]!r} was frozen or unfrozen: keep what is trained unchanged while it is recorded."
            )
        for name, param in self._params.items():
            if param.grad is None:
                raise UnsupportedError(f"{where}, parameter {name!r} has no gradient: use it in the loss or freeze it.")
            if param.grad.is_sparse:
                raise UnsupportedError(
                    f"{where}, the gradient of {name!r} is sparse: build its layer with sparse=False."
                )
        self._hypers = hypers_of(optimizer, self._rule, self._params)
        if self._steps == 0:
            _check_modules(self._model)
            manifest = Manifest(
                rule=self._rule,
                shapes={name: list(param.shape) for name, param in self._params.items()},
                dtypes={name: str(param.dtype).removeprefix("torch.") for name, param in self._params.items()},
                constants=constants_of(self._model, self._rule),
                train_size=self._train_size,
            )
            self._writer.begin(manifest, self._state())

    def _after_step(self, _optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict[str, Any]) -> None:
        # One question a step: a sum is finite only if all its terms are.
        if not torch.isfinite(sum_of(param.detach().sum() for param in self._params.values())):
            self._stop_at_nan()
        ids, fingerprint = self._pending.pop()
        self._steps += 1
        state = self._state() if self._keep.wants(self._steps) else None
        if state is not None:
            self._keep.note(self._steps, nbytes(state))
        self._writer.append(Record(self._steps - 1, self._epoch, ids, self._hypers, fingerprint), state)

    def _stop_at_nan(self) -> None:
        broken = [name for name, param in self._params.items() if not torch.isfinite(param).all()]
        if not broken:
            return  # large finite values whose sum overflows
        self._release()
        self._cut = True
        self._writer.finish(complete=False)
        raise RunError(
            f"Step {self._steps} made parameter {broken[0]!r} NaN or infinite: lower the learning rate or look at "
            "the loss of its batch; the steps before it are kept."
        )

    def _state(self) -> State:
        state: State = {PARAM: {name: _copy(param) for name, param in self._params.items()}}
        for slot in self._rule.slots:
            if slot != PARAM:
                state[slot] = {name: _copy(self._buffer(param, slot)) for name, param in self._params.items()}
        return state

    def _buffer(self, param: Tensor, slot: str) -> Tensor:
        held = self._optimizer.state[param].get(slot) if param in self._optimizer.state else None
        return torch.zeros_like(param) if held is None else held


class Keep:
    """Which states are worth their room on disk.

    >>> keep = Keep("auto", budget=3)
    >>> [i for i in range(1, 60) if keep.wants(i) and keep.note(i, 1) is None]
    [1, 2, 3, 6, 11, 18, 26, 36, 48]
    """

    def __init__(self, keep: str | int, budget: int) -> None:
        if keep not in ("all", "auto") and not (isinstance(keep, int) and keep >= 1):
            raise InputError(f"keep={keep!r} is unknown: use 'all', 'auto', or a number K for every K-th state.")
        self._keep, self._budget = keep, budget
        self._used = 0
        self._next = 1

    def wants(self, index: int) -> bool:
        """Whether the state before step ``index`` is kept."""
        if isinstance(self._keep, int):
            return index % self._keep == 0
        return self._keep == "all" or index >= self._next

    def note(self, index: int, size: int) -> None:
        """The state was kept, and took this much room."""
        self._used += size
        # Gaps of 2√i make √N of N.
        self._next = index + 1 if self._used < self._budget else index + max(1, round(2 * index**0.5))


class _NotingSampler:
    """A sampler that appends what it draws to a queue; loaders hand batches out in the order they were drawn."""

    def __init__(self, sampler: Any, drawn: deque[list[int]]) -> None:
        self.sampler = sampler
        self.drawn = drawn

    def __iter__(self) -> Iterator[Any]:
        for indices in self.sampler:
            noted = torch.as_tensor(indices).reshape(-1)  # a number, or any sequence or array of them
            self.drawn.append(noted.tolist())
            yield indices

    def __len__(self) -> int:
        return len(self.sampler)


def _copy(tensor: Tensor) -> Tensor:
    # Always a copy: the optimizer changes its tensors in place.
    return tensor.detach().to("cpu", copy=True).contiguous()


def _check_modules(model: nn.Module) -> None:
    if problems := module_problems(model):
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise UnsupportedError(f"This model cannot be recorded exactly:\n{listed}")


def _check_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise InputError(
            f"watch() takes a torch DataLoader, not a {type(loader).__name__}: use recorder.step(ids) in other loops."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise UnsupportedError(
            "The loader reads an IterableDataset, whose examples have no numbers: use a map-style Dataset, or call "
            "recorder.step(ids) before each optimizer.step()."
        )
    if not getattr(loader, "in_order", True):
        raise UnsupportedError("The loader hands batches out of order: build it with in_order=True.")


def hypers_of(optimizer: torch.optim.Optimizer, rule: Rule, params: dict[str, Any]) -> list[Hyper]:
    """Every group's hyperparameters as the coming step will use them."""
    return [
        _group_hypers(optimizer, rule, number, [params[name] for name, g in rule.groups.items() if g == number])
        for number in range(len(optimizer.param_groups))
    ]


def _group_hypers(optimizer: torch.optim.Optimizer, rule: Rule, number: int, params: list[Any]) -> Hyper:
    group = optimizer.param_groups[number]
    if group.get("maximize"):
        raise UnsupportedError(f"Parameter group {number} has maximize=True: minimise the negative loss instead.")
    if group.get("amsgrad"):
        raise UnsupportedError(f"Parameter group {number} has amsgrad=True: set amsgrad=False.")
    states = [optimizer.state.get(param, {}) for param in params]
    if rule.kind == "SGD":
        if group["momentum"] != 0 and "momentum_buffer" not in rule.slots:
            raise UnsupportedError(f"Parameter group {number} turned momentum on while training: start with it on.")
        started = {state.get("momentum_buffer") is not None for state in states}
        if len(started) > 1:
            raise UnsupportedError(
                f"Only some parameters of group {number} have momentum yet: put new ones in a group."
            )
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
        return {**{name: float(group[name]) for name in names}, "started": float(started.pop() if started else 0)}
    counts = {int(state["step"]) if "step" in state else 0 for state in states}
    if len(counts) > 1:
        raise UnsupportedError(
            f"The parameters of group {number} have taken different numbers of steps: split the group."
        )
    beta1, beta2 = (float(beta) for beta in group["betas"])
    hyper = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
    return {**hyper, "beta1": beta1, "beta2": beta2, "step": float(counts.pop() + 1 if counts else 1)}


def constants_of(model: nn.Module, rule: Rule) -> dict[str, int]:
    """A checksum of each tensor in the model that is not trained: frozen parameters and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: batches.fingerprint(tensor)[0][0] for name, tensor in named if name not in rule.groups}
