"""What is known of modules by their kind: which cannot be recorded exactly, and which have modes."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

COUNT = "num_batches_tracked"
"""The name of BatchNorm's buffer that counts batches."""

MODAL = ("batchnorm", "dropout", "instancenorm", "rnn", "activation", "transformer")
"""Files of ``torch.nn.modules`` with modules that compute something else in training mode."""


def module_problems(model: nn.Module) -> list[str]:
    """List the modules that cannot be recorded exactly, with those of one kind on one line.

    >>> module_problems(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2)))[0][:60]
    "'0' is BatchNorm1d(track_running_stats=False), which mixes t"
    """
    places: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if problem := _module_problem(module):
            places.setdefault(problem, []).append(repr(name or "model"))
    lines = [
        f"{names[0]} is {problem}" if len(names) == 1 else f"{len(names)} layers ({names[0]}, ...) are {problem}"
        for problem, names in places.items()
    ]
    return lines + _device_problems(model) + _type_problems(model)


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


def _module_problem(module: nn.Module) -> str | None:
    kind = type(module).__name__
    if isinstance(module, nn.SyncBatchNorm) and _in_several_processes():
        return (
            "SyncBatchNorm, which takes statistics over several processes, of which only one is recorded; train with "
            "BatchNorm, or in one process"
        )
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
        return (
            f"{kind}(track_running_stats=False), which mixes the examples of a batch in evaluation mode too, so that a "
            "query's loss depends on the other queries; train with track_running_stats=True"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.requires_grad:
        if module.scale_grad_by_freq:
            return (
                f"{kind}(scale_grad_by_freq=True), which divides an example's gradient by how often its words occur "
                "in the whole batch; train with scale_grad_by_freq=False"
            )
        if module.max_norm is not None:
            return (
                f"{kind}(max_norm={module.max_norm}), which changes its weights in the forward pass; leave max_norm "
                "out, and normalise the looked-up vectors if they must be short"
            )
    return None


def _in_several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def mode_matters(module: nn.Module) -> bool:
    """Say whether a module may compute something else in training mode: all but those of PyTorch that do not.

    >>> mode_matters(nn.Linear(1, 1)), mode_matters(nn.Dropout())
    (False, True)
    """
    home = type(module).__module__
    return not home.startswith("torch.nn.modules.") or home.rsplit(".", 1)[1] in MODAL
