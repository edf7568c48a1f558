"""Checks the first forward pass of a training: can ``torch.func`` transform it, as all scoring requires?

Only a model with a custom ``autograd.Function`` is tried, once, on a copy in evaluation mode and before anything is
written. The training is unaffected: the model, the random generators and the inputs do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.func import grad
from torch.utils._pytree import tree_map_only

from leaveout._util.generators import random_state, set_random_state
from leaveout._util.trees import sum_of
from leaveout._util.wrappers import bare
from leaveout.errors import UnsupportedError, first_line


class FirstPass:
    """A forward hook that checks the first pass with gradients and then removes itself; copies of it do nothing.

    Args:
        model: what the loop calls; None for no hook.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._remove: Callable[[], None] | None = None
        if model is not None:
            self._remove = model.register_forward_hook(self, with_kwargs=True).remove

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        """Check, if custom autograd functions computed these outputs, that ``torch.func`` can transform the model."""
        if self._remove is None or not torch.is_grad_enabled():
            return
        self.release()
        if names := own_functions(outputs):
            check_transformed(bare(model), args, kwargs, names)

    def release(self) -> None:
        """Remove the hook from the model."""
        if self._remove is not None:
            self._remove()
        self._remove = None

    def __reduce__(self) -> tuple:
        return FirstPass, ()


def own_functions(outputs: Any) -> list[str]:
    """Return the names of the autograd functions that computed the outputs, except PyTorch's own."""
    ahead = [tensor.grad_fn for tensor in tensors_of(outputs)]
    seen, found = set(ahead), set[str]()
    while ahead:
        node = ahead.pop()
        if node is None:
            continue
        function = getattr(node, "_forward_cls", None) if isinstance(node, BackwardCFunction) else None
        if function is not None and not function.__module__.startswith("torch."):
            found.add(function.__name__)
        further = [one for one, _ in node.next_functions if one not in seen]
        seen.update(further)
        ahead += further
    return sorted(found)


def tensors_of(outputs: Any) -> list[Tensor]:
    """Return the tensors in a model's output, which may nest tuples, lists and dicts.

    >>> len(tensors_of({"loss": torch.ones(()), "more": (torch.ones(2), None)}))
    2
    """
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    if not isinstance(outputs, list | tuple):
        return []
    return [tensor for part in outputs for tensor in tensors_of(part)]


def check_transformed(model: nn.Module, args: tuple, kwargs: dict[str, Any], names: list[str]) -> None:
    """Refuse a model with these custom functions if ``torch.func`` cannot take its gradient."""
    from leaveout.task.forward import Called  # takes long, and most models have no such functions

    devices = {str(tensor.device) for tensor in model.parameters()} - {"cpu"}
    before = random_state(*devices)
    try:
        twin = copy.deepcopy(model)
    except Exception:  # noqa: BLE001 - a module may refuse to be copied with any error; then the task reports it
        return
    given, named = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))

    def rule(called: nn.Module, _batch: Any) -> tuple[Tensor, None]:
        floating = [tensor for tensor in tensors_of(called(*given, **named)) if tensor.is_floating_point()]
        return sum_of(tensor.sum() for tensor in floating), None

    params = {name: param.detach().clone() for name, param in twin.named_parameters() if param.requires_grad}
    called = Called(twin, rule)
    try:
        grad(lambda chosen: called.pure(chosen, None, frozenset())[0][0])(params)
    except Exception as error:
        raise UnsupportedError(
            f"torch.func cannot take the gradient of this model, which has autograd functions of its own "
            f"({', '.join(names)}): {first_line(error)}. Nothing was recorded. Write what they do with PyTorch's own "
            "functions, or give them a setup_context and generate_vmap_rule = True.",
            code="model-not-supported",
        ) from error
    finally:
        set_random_state(before)
