"""What cannot be handled exactly is found before anything runs, all of it at once, each with its remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leaveout.errors import InputError
from leaveout.task import batches
from leaveout.task.forms import Abilities
from leaveout.task.guard.compare import compared, tried

if TYPE_CHECKING:
    from leaveout.task.task import Task

TRIAL = 3


def module_problems(model: nn.Module) -> list[str]:
    """Modules that tie examples together or draw random numbers while training.

    >>> module_problems(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    ["'1' is Dropout(p=0.5) in training mode, so every pass differs; set p=0 or call .eval() on it before training"]
    """
    found = [problem for name, module in model.named_modules() if (problem := _module_problem(name or "model", module))]
    return found + _device_problems(model) + _type_problems(model)


def _device_problems(model: nn.Module) -> list[str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        return [f"{empty[0]!r} is on the device 'meta' and has no values; put the model on a real device first"]
    devices = sorted({str(tensor.device) for _, tensor in tensors})
    return [f"the model is spread over {', '.join(devices)}; put it on one device"] if len(devices) > 1 else []


def _type_problems(model: nn.Module) -> list[str]:
    kinds = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    complex_ones = [name for name, dtype in kinds.items() if dtype.is_complex]
    if complex_ones:
        return [f"{complex_ones[0]!r} is complex; train its real and imaginary parts as two real parameters"]
    words = sorted({str(dtype).removeprefix("torch.") for dtype in kinds.values()})
    if len(words) > 1:
        return [f"the trained parameters are of several types ({', '.join(words)}); convert the model to one"]
    return []


def _module_problem(name: str, module: nn.Module) -> str | None:
    kind = type(module).__name__
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or not module.track_running_stats):
        return (
            f"{name!r} is {kind} in training mode, which mixes the examples of a batch; "
            "use GroupNorm or LayerNorm, or call .eval() on it before training"
        )
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.training and module.track_running_stats:
        return f"{name!r} is {kind} with running statistics; set track_running_stats=False"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.requires_grad:
        if module.scale_grad_by_freq:
            return (
                f"{name!r} is {kind}(scale_grad_by_freq=True), which divides an example's gradient by how often its "
                "words occur in the whole batch; train with scale_grad_by_freq=False"
            )
        if module.max_norm is not None:
            return (
                f"{name!r} is {kind}(max_norm={module.max_norm}), which changes its weights in the forward pass; "
                "leave max_norm out, and normalise the looked-up vectors if they must be short"
            )
    if not module.training:
        return None
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        return (
            f"{name!r} is {kind}(p={module.p}) in training mode, so every pass differs; "
            "set p=0 or call .eval() on it before training"
        )
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0:
        return f"{name!r} is {kind} with dropout={module.dropout} in training mode; set dropout=0"
    if isinstance(module, nn.RReLU):
        return f"{name!r} is RReLU in training mode, which draws random slopes; use LeakyReLU"
    return None


def trial_problems(task: Task, check: bool = True) -> tuple[list[str], Abilities]:
    """Problems that show on the first examples, and what the model's operations support."""
    none = Abilities()
    ids = list(range(min(TRIAL, task.size)))
    try:
        batch, again = task.read(ids), task.read(ids)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - a user's data set or collate may raise anything; it is passed on in words
        return [f"the first training examples cannot be read: {_line(error)}"], none
    if batches.fingerprint(batch) != batches.fingerprint(again):
        return [
            "the training set gives something else each time it is read (random augmentation?); "
            "make it return the same example for the same number"
        ], none
    if problem := _structure_problem(batch, len(ids)):
        return [problem], none
    params = {name: param.detach().clone() for name, param in task.parameters().items()}
    if not params:
        return ["no parameter of the model is trained; set requires_grad=True on those that should be"], none
    buffers = {name: buffer.clone() for name, buffer in task.model.named_buffers()}
    rng = torch.get_rng_state()
    try:
        with torch.no_grad():
            losses = task._loss(*task.outputs(task.parameters(), batch))  # its shape is looked at below
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - a user's model may raise anything; it is passed on in words
        return [f"the model or the loss fails on the first training examples: {_line(error)}"], none
    problems = _side_effects(task.model, buffers, rng)
    if problems:
        return problems, none
    if changed := [name for name, param in task.parameters().items() if not torch.equal(param, params[name])]:
        with torch.no_grad():
            for name in changed:
                task.parameters()[name].copy_(params[name])
        return [
            f"the forward pass changes the parameter {changed[0]!r}; only the optimizer may change parameters "
            "(for an embedding's max_norm: normalise the looked-up vectors instead)"
        ], none
    if problem := _shape_problem(losses, len(ids)):
        return [problem], none
    problem, abilities = compared(task, params, batch) if check else tried(task, params, batch)
    return [problem] if problem else [], abilities


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _structure_problem(batch: Any, count: int) -> str | None:
    for i, leaf in enumerate(batches.leaves(batch)):
        if not isinstance(leaf, Tensor):
            return (
                f"item {i} of a batch is a {type(leaf).__name__}, not a tensor; "
                "give collate= a function that returns tensors only"
            )
        if leaf.ndim == 0 or len(leaf) != count:
            return (
                f"tensor {i} of a batch of {count} examples has shape {list(leaf.shape)}; its first dimension must "
                "count the examples (collate= says how a batch is built)"
            )
    return None


def _side_effects(model: nn.Module, buffers: dict[str, Tensor], rng: Tensor) -> list[str]:
    problems = []
    if not torch.equal(torch.get_rng_state(), rng):
        torch.set_rng_state(rng)
        problems.append("the forward pass draws random numbers; make it a function of parameters and inputs alone")
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, buffers[name]):
            buffer.copy_(buffers[name])
            problems.append(f"the forward pass changes the buffer {name!r}; buffers must stay constant in training")
    return problems


def _shape_problem(losses: Tensor, count: int) -> str | None:
    if losses.shape == (count,):
        return None
    return (
        f"the loss of {count} examples has shape {list(losses.shape)} instead of [{count}]; "
        "give an nn loss module, or a callable that returns one loss per example (reduction='none')"
    )
