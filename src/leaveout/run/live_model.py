"""Whether a model that is being trained can be recorded: its modules, and what is trained of it at a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leaveout._util.trees import PARAM, State
from leaveout.errors import UnsupportedError
from leaveout.optim import Rule, buffers
from leaveout.task.checks import module_problems
from leaveout.task.forward import bare


def check_modules(model: nn.Module) -> None:
    """Refuse a model with modules that no record could follow, or one that is spread over devices."""
    if isinstance(model, nn.DataParallel):
        raise UnsupportedError(
            "DataParallel spreads each batch over several devices: use DistributedDataParallel, or one device.",
            code="distributed-not-supported",
        )
    model = bare(model)
    if problems := module_problems(model):
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise UnsupportedError(f"This model cannot be recorded exactly:\n{listed}", code="model-not-supported")


def check_trained(where: str, model: nn.Module, params: dict[str, Tensor], *, gradients: bool) -> None:
    """Refuse a step that trains a parameter which the recording has left out as frozen; look at the ``gradients``."""
    for name, param in model.named_parameters():
        if param.requires_grad and name not in params:
            raise UnsupportedError(
                f"{where}, {name!r} was unfrozen, which was frozen when the recording began and is a constant of this "
                "run: make the Recorder before anything is frozen, and freeze afterwards what is to be trained "
                "later; or finish() here and record what follows as another run.",
                code="unfrozen-late",
            )
    if gradients:
        check_gradients(where, params)


def check_gradients(where: str, params: dict[str, Tensor]) -> None:
    """Refuse gradients that are sparse, left over from before a parameter was frozen, or not there at all."""
    for name, param in params.items():
        if param.grad is not None and param.grad.is_sparse:
            raise UnsupportedError(
                f"{where}, the gradient of {name!r} is sparse: build its layer with sparse=False.",
                code="gradient-sparse",
            )
        if param.grad is not None and not param.requires_grad and bool(param.grad.any()):
            raise UnsupportedError(
                f"{where}, {name!r} is frozen and moves by a gradient from before: call optimizer.zero_grad() after "
                "freezing it.",
                code="gradient-left-over",
            )
    if all(param.grad is None for param in params.values()):
        raise UnsupportedError(
            f"{where}, no parameter has a gradient: call backward() before optimizer.step().", code="gradient-missing"
        )


def state_of(optimizer: torch.optim.Optimizer, rule: Rule, params: dict[str, Tensor]) -> State:
    """Return a copy of parameters and optimizer state: the optimizer changes its tensors in place."""
    state: State = {slot: {} for slot in rule.own_slots}
    for name, param in params.items():
        for slot, tensor in {PARAM: param, **buffers(optimizer, rule, param)}.items():
            state[slot][name] = tensor.detach().to("cpu", copy=True).contiguous()
    return state
