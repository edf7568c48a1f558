"""What cannot be handled exactly is found before anything runs, all of it at once, each with its remedy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from leaveout._util.trees import pullback
from leaveout.errors import InputError
from leaveout.task import batches

if TYPE_CHECKING:
    from leaveout.task.task import Task

TRIAL = 3


def module_problems(model: nn.Module) -> list[str]:
    """Modules that tie examples together or draw random numbers while training.

    >>> module_problems(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    ["'1' is Dropout(p=0.5) in training mode, so every pass differs; set p=0 or call .eval() on it before training"]
    """
    found = [problem for name, module in model.named_modules() if (problem := _module_problem(name or "model", module))]
    return found + _device_problems(model)


def _device_problems(model: nn.Module) -> list[str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        return [f"{empty[0]!r} is on the device 'meta' and has no values; put the model on a real device first"]
    devices = sorted({str(tensor.device) for _, tensor in tensors})
    return [f"the model is spread over {', '.join(devices)}; put it on one device"] if len(devices) > 1 else []


def _module_problem(name: str, module: nn.Module) -> str | None:
    kind = type(module).__name__
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or not module.track_running_stats):
        return (
            f"{name!r} is {kind} in training mode, which mixes the examples of a batch; "
            "use GroupNorm or LayerNorm, or call .eval() on it before training"
        )
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.training and module.track_running_stats:
        return f"{name!r} is {kind} with running statistics; set track_running_stats=False"
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


class Abilities(NamedTuple):
    """Which of PyTorch's transforms the model's operations support; without them the work is done more slowly."""

    vmap: bool = False
    forward: bool = False
    curved: bool = True


def trial_problems(task: Task) -> tuple[list[str], Abilities]:
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
    params = {name: param.detach() for name, param in task.parameters().items()}
    if not params:
        return ["no parameter of the model is trained; set requires_grad=True on those that should be"], none
    buffers = {name: buffer.clone() for name, buffer in task.model.named_buffers()}
    rng = torch.get_rng_state()
    try:
        with torch.no_grad():
            losses = task._loss(*task.outputs(params, batch))  # its shape is looked at below
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - a user's model may raise anything; it is passed on in words
        return [f"the model or the loss fails on the first training examples: {_line(error)}"], none
    problems = _side_effects(task.model, buffers, rng)
    if problems:
        return problems, none
    if problem := _loss_problem(task, params, batch, losses):
        return [problem], none
    return [], _abilities(task, params, batch)


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


def _loss_problem(task: Task, params: dict[str, Tensor], batch: Any, losses: Tensor) -> str | None:
    count = len(batches.leaves(batch)[0])
    if losses.shape != (count,):
        return (
            f"the loss of {count} examples has shape {list(losses.shape)} instead of [{count}]; "
            "give an nn loss module, or a callable that returns one loss per example (reduction='none')"
        )
    with torch.no_grad():
        alone = torch.stack([task.example_loss(params, _example(batch, i)) for i in range(count)])
        together = task.losses(params, batch)
    if not torch.allclose(alone, together, rtol=1e-3, atol=1e-5, equal_nan=True):
        return (
            f"the loss of an example depends on the other examples in its batch ({alone[0]:.6g} alone, "
            f"{together[0]:.6g} with others); normalise and compare within single examples only, and check that "
            "outputs and targets have the same shape"
        )
    return None


def _example(batch: Any, i: int) -> Any:
    return batches.map_leaves(lambda leaf: leaf[i], batch)


def _abilities(task: Task, params: dict[str, Tensor], batch: Any) -> Abilities:
    """Second derivatives are tried with ``vmap``, and in forward mode; some operations have no rule for one of them."""

    def pulled(example: Any) -> dict[str, Tensor]:
        _, pull = pullback(lambda p: grad(task.example_loss)(p, example), params)
        return pull(params)[0]

    def pushed(example: Any) -> Any:
        return jvp(lambda p: grad(task.example_loss)(p, example), (params,), (params,))

    if _works(vmap(pulled), batch):
        return Abilities(vmap=True, forward=_works(vmap(pushed), batch))
    first = _example(batch, 0)
    return Abilities(vmap=_works(vmap(partial(grad(task.example_loss), params)), batch), curved=_works(pulled, first))


def _works(function: Any, batch: Any) -> bool:
    try:
        function(batch)
    except (RuntimeError, NotImplementedError):
        return False
    return True
