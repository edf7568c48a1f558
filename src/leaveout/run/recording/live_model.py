"""Checks that a model in training can be recorded: its modules, and which parameters each step trains."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leaveout._util.files import SURROGATE
from leaveout._util.trees import PARAM, State
from leaveout._util.wrappers import bare
from leaveout.errors import UnsupportedError
from leaveout.optim import Rule, buffers
from leaveout.task.modules import module_problems


def check_modules(model: nn.Module) -> None:
    """Refuse a model with modules that cannot be recorded exactly, or one that is spread over several devices."""
    if isinstance(model, nn.DataParallel):
        raise UnsupportedError(
            "DataParallel spreads each batch over several devices: use DistributedDataParallel, or one device.",
            code="distributed-not-supported",
        )
    model = bare(model)
    if problems := [*module_problems(model), *_name_problems(model)]:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise UnsupportedError(f"This model cannot be recorded exactly:\n{listed}", code="model-not-supported")


def _name_problems(model: nn.Module) -> list[str]:
    """Name a parameter or buffer that no file can hold by its name: the whole run would be lost."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if SURROGATE.search(name)]
    return [f"the name {names[0]!r} has a character that UTF-8 does not have; give its module another"] if names else []


FEW = 1 << 15
"""Tensors with at most this many elements on average count as small."""


class Frozen:
    """The parameters that were frozen when the recording began; collected again whenever the model's structure changes.

    Args:
        model: the model that is trained.
        params: the parameters that are trained.
    """

    def __init__(self, model: nn.Module, params: dict[str, Tensor]) -> None:
        self._model, self._params = model, params
        self._look()

    def check(self, where: str) -> None:
        """Refuse a step that trains one of them."""
        if not self._is_as_it_was():
            self._look()
        for name, param in self._frozen:
            if param.requires_grad:
                raise UnsupportedError(
                    f"{where}, {name!r} was unfrozen, which was frozen when the recording began and is a constant of "
                    "this run: make the Recorder before anything is frozen, and freeze afterwards what is to be "
                    "trained later; or finish() here and record what follows as another run.",
                    code="unfrozen-late",
                )

    def _look(self) -> None:
        self._frozen = [(n, p) for n, p in self._model.named_parameters() if n not in self._params]
        self._tables = [table for part in self._model.modules() for table in (part._parameters, part._modules)]
        self._held = list(chain.from_iterable(table.values() for table in self._tables))

    def _is_as_it_was(self) -> bool:
        """Say whether every module still has the same parameters and submodules; quicker than a walk by name."""
        now = list(chain.from_iterable(table.values() for table in self._tables))
        return len(now) == len(self._held) and all(map(is_, now, self._held))


def check_gradients(where: str, params: dict[str, Tensor]) -> None:
    """Refuse gradients that are sparse, left over from before a parameter was frozen, or all missing."""
    missing = 0
    for name, param in params.items():
        grad = param.grad
        if grad is None:
            missing += 1
            continue
        if grad.is_sparse:
            raise UnsupportedError(
                f"{where}, the gradient of {name!r} is sparse: build its layer with sparse=False.",
                code="gradient-sparse",
            )
        if not param.requires_grad and bool(grad.any()):
            raise UnsupportedError(
                f"{where}, {name!r} is frozen and moves by a gradient from before: call optimizer.zero_grad() after "
                "freezing it.",
                code="gradient-left-over",
            )
    if missing == len(params):
        raise UnsupportedError(
            f"{where}, no parameter has a gradient: call backward() before optimizer.step().", code="gradient-missing"
        )


def is_unmoved(where: str, params: dict[str, Tensor]) -> bool:
    """Say that a step whose batches were all taken back moved nothing, because no parameter has a gradient.

    If a parameter does have a gradient, the step is refused.
    """
    if any(param.grad is not None for param in params.values()):
        raise UnsupportedError(
            f"{where}, there is no loss of this batch, and the optimizer steps with gradients that are zero or from "
            "before, by which momentum and weight decay still move the parameters: leave gradients away where a batch "
            "is skipped (zero_grad(set_to_none=True)), or return a loss of zero.",
            code="step-without-loss",
        )
    return True


def state_of(
    optimizer: torch.optim.Optimizer, rule: Rule, params: dict[str, Tensor], copied: Sequence[Piece] = ()
) -> State:
    """Return a copy of parameters and optimizer state: the optimizer changes its tensors in place.

    ``copied`` may hold copies of all parameters in a few flat pieces; they then become part of the state.
    """
    state: State = {slot: {} for slot in rule.own_slots}
    held: list[tuple[str, str, Tensor]] = []
    if copied:
        state[PARAM] = dict(zip(params, taken_apart(copied), strict=True))
    else:
        held += [(PARAM, name, param.detach()) for name, param in params.items()]
    if len(state) > 1:
        held += [(slot, name, t) for name, p in params.items() for slot, t in buffers(optimizer, rule, p).items()]
    for (slot, name, _), tensor in zip(held, _copied([tensor for *_, tensor in held]), strict=True):
        state[slot][name] = tensor
    return state


def _copied(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Copy tensors, packing many small ones into one block of memory."""
    if tensors and are_small(tensors):
        return taken_apart([joined(part) for part in together(tensors)])
    return [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]


def are_small(tensors: Sequence[Tensor]) -> bool:
    """Say whether these are several CPU tensors of one dtype, so small that call overhead dominates."""
    first = tensors[0]
    alike = all(tensor.dtype == first.dtype and tensor.device == first.device for tensor in tensors)
    small = sum(tensor.numel() for tensor in tensors) <= FEW * len(tensors)
    return alike and small and first.device.type == "cpu" and len(tensors) > 1


class Piece(NamedTuple):
    """Tensors, and a copy of them in one block of memory."""

    tensors: list[Tensor]
    copy: Tensor


def together(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split small tensors into parts that PyTorch copies, and takes the norm of, on one thread.

    PyTorch would copy larger parts one tensor at a time, and wake up threads that small trainings do not need.

    >>> [len(part) for part in together([torch.zeros(12_000)] * 5)]
    [2, 2, 1]
    """
    parts: list[list[Tensor]] = []
    size = FEW
    for tensor in tensors:
        size += tensor.numel()
        if size >= FEW:
            parts.append([])
            size = tensor.numel()
        parts[-1].append(tensor)
    return parts


def joined(tensors: list[Tensor]) -> Piece:
    """Copy tensors into one block of memory."""
    if len(tensors) == 1:  # the function below would not copy it
        return Piece(tensors, tensors[0].detach().clone(memory_format=torch.contiguous_format).view(-1))
    return Piece(tensors, torch._utils._flatten_dense_tensors(tensors))


def taken_apart(pieces: Sequence[Piece]) -> list[Tensor]:
    """Return the copies of all tensors, in their original shapes."""
    return [part for one in pieces for part in torch._utils._unflatten_dense_tensors(one.copy, one.tensors)]
