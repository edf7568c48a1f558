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
    """Refuse a model with modules that no record could follow, or one that several processes train."""
    shared = isinstance(model, nn.parallel.DistributedDataParallel) and torch.distributed.get_world_size() > 1
    if shared or isinstance(model, nn.DataParallel):
        raise UnsupportedError(
            f"{type(model).__name__} spreads batches over several devices or processes, of which this one sees its own "
            "part only: record a training in one process.",
            code="distributed-not-supported",
        )
    model = bare(model)
    if problems := module_problems(model):
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise UnsupportedError(f"This model cannot be recorded exactly:\n{listed}", code="model-not-supported")


def check_trained(where: str, model: nn.Module, params: dict[str, Tensor], *, gradients: bool) -> None:
    """Refuse a step that trains other parameters than those before; with ``gradients``, also one that lacks some."""
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    if changed := sorted(trained ^ set(params)):
        raise UnsupportedError(
            f"{where}, {changed[0]!r} was frozen or unfrozen: keep what is trained unchanged while it is recorded.",
            code="trained-set-changed",
        )
    for name, param in params.items() if gradients else ():
        if param.grad is None:
            raise UnsupportedError(
                f"{where}, parameter {name!r} has no gradient: use it in the loss or freeze it.",
                code="gradient-missing",
            )
        if param.grad.is_sparse:
            raise UnsupportedError(
                f"{where}, the gradient of {name!r} is sparse: build its layer with sparse=False.",
                code="gradient-sparse",
            )


def state_of(optimizer: torch.optim.Optimizer, rule: Rule, params: dict[str, Tensor]) -> State:
    """Return a copy of parameters and optimizer state: the optimizer changes its tensors in place."""
    state: State = {slot: {} for slot in rule.slots}
    for name, param in params.items():
        for slot, tensor in {PARAM: param, **buffers(optimizer, rule, param)}.items():
            state[slot][name] = tensor.detach().to("cpu", copy=True).contiguous()
    return state
