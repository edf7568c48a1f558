"""Proves the first step of a training as far as that needs no loss: its forward pass, computed again from the record.

This is done once, on a copy of the model, right after the step. The training goes on as if nothing had been computed:
neither the model nor a random generator nor an input changes.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.func import functional_call, grad
from torch.utils._pytree import tree_map_only

from leaveout._util.generators import RandomState, is_aside, set_random_state, undisturbed
from leaveout._util.trees import Params, sum_of
from leaveout._util.wrappers import bare
from leaveout.errors import LeaveoutError, first_line, kind_of
from leaveout.run.recording import failures
from leaveout.run.recording.forwards import Pass
from leaveout.run.recording.method_hook import MethodHook
from leaveout.run.seen import DRAWN, GIVEN, OTHERWISE, YIELDED
from leaveout.task import batches

APART = 0.05
"""How far outputs may be from those of training, relative to their size: more than rounding in 16 bits, and less than a
mask of dropout."""

SAME = 1e-6
"""The same where a generator moved during the pass that is not recorded."""


class FirstPass:
    """Notes what the model is given and returns in the first forward pass, and proves it after the first step.

    Args:
        model: what the loop calls; None if there is nothing to prove.
        note: writes down what was seen.
    """

    def __init__(self, model: nn.Module | None, note: Callable[[str, str], None]) -> None:
        self._model, self._note = model, note
        self._hooks: list[Any] = []
        self._arrived: Any = None
        if model is not None:
            self._hooks = [
                model.register_forward_pre_hook(MethodHook(self._before), with_kwargs=True),
                model.register_forward_hook(MethodHook(self._after)),
            ]
            self.forget()

    @property
    def waits(self) -> bool:
        """Whether the first step is still to come."""
        return bool(self._hooks)

    def arrive(self) -> None:
        """Note that the loader yields a batch: what is drawn from now on until the pass may go into its inputs."""
        self._arrived = _unrecorded_state() if self._hooks else None

    def expect(self) -> None:
        """Note that a batch was named: if a pass follows, that is the batch's first, and not one before."""
        self._expected = True

    def forget(self) -> None:
        """Forget a pass that did not lead to a step."""
        if not self.waits:
            return
        self._given: tuple[tuple, dict[str, Any]] | None = None
        self._outputs: Any = None
        self._names: list[str] = []
        self._between = self._within = self._expected = False

    def release(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before(self, _model: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        # Libraries that move hooks to another module forget that some want keywords: then the inputs are not known.
        awaited = self._given is None or self._expected
        if awaited and torch.is_grad_enabled() and kwargs is not None and not is_aside():
            self._expected, self._outputs, self._state = False, None, _unrecorded_state()
            self._between = self._arrived is not None and self._arrived != self._state
            self._given = _copied((args, kwargs))

    def _after(self, _model: nn.Module, _args: tuple, outputs: Any) -> None:
        if self._given is not None and self._outputs is None and torch.is_grad_enabled() and not is_aside():
            self._outputs, self._names = _copied(tensors_of(outputs)), own_functions(outputs)
            self._within = self._state != _unrecorded_state()

    def problem(
        self, first: Pass | None, ids: Tensor, batch: Any, drawn: RandomState | None, start: Params
    ) -> LeaveoutError | None:
        """Return what keeps the first step from being scored, as far as it shows without the loss.

        Args:
            first: the first forward pass, as it was recorded; None if the model was not called as a whole.
            ids: the examples of the batch.
            batch: the batch it belongs to; None if it is not known.
            drawn: the states of the random generators when the loader yielded the batch; None if none did.
            start: parameters and moving buffers before the step.
        """
        for place, leaf in enumerate([] if batch is None else batches.leaves(batch)):
            if not isinstance(leaf, Tensor):
                return failures.rows_differ(len(ids), place, kind_of(leaf))
            if leaf.ndim == 0 or len(leaf) != len(ids):
                return failures.rows_differ(len(ids), place, f"a tensor of shape {list(leaf.shape)}")
        if first is None or self._given is None or self._model is None or self._outputs is None:
            return None
        given = self._note_given(batch, drawn is not None and self._was_drawn(first, drawn))
        try:
            return self._of_pass(first, start) or given
        except Exception:  # noqa: BLE001 - memory may be short, a model may raise anything; the training must go on
            return given

    def _was_drawn(self, first: Pass, drawn: Mapping[str, Tensor]) -> bool:
        return self._between or not all(torch.equal(first.random[name], drawn[name]) for name in drawn)

    def _note_given(self, batch: Any, drawn: bool) -> LeaveoutError | None:
        """Note whether the model was given what the loader yielded."""
        if batch is None or self._given is None:
            return None
        leaves = [leaf for leaf in batches.leaves(batch) if isinstance(leaf, Tensor)]
        given = tensors_of([*self._given[0], self._given[1]])
        if all(any(_holds(tensor, leaf) for leaf in leaves) for tensor in given):
            self._note(GIVEN, YIELDED)
            return None
        self._note(GIVEN, DRAWN if drawn else OTHERWISE)
        return failures.input_drawn() if drawn else None

    def _of_pass(self, first: Pass, start: Params) -> LeaveoutError | None:
        """Compute the pass again, on a copy of the model in its first state."""
        assert self._model is not None  # noqa: S101 - asked before
        model = bare(self._model)
        try:
            twin = copy.deepcopy(model)
        except Exception:  # noqa: BLE001 - a module may refuse to be copied with any error; then the task reports it
            return None
        device = next(model.parameters()).device
        buffers = {name: buffer.dtype for name, buffer in twin.named_buffers()}
        state = {n: tensor.to(device, buffers.get(n, tensor.dtype), copy=True) for n, tensor in start.items()}
        cast = None if first.autocast is None else torch.autocast(device.type, getattr(torch, first.autocast))
        with undisturbed(device), cast or nullcontext():
            trained = {name: tensor for name, tensor in state.items() if name not in buffers}
            if problem := self._transformed(twin, trained):
                return problem
            for name, module in twin.named_modules():
                module.training = name in first.training
            set_random_state(first.random)
            args, kwargs = _copied(self._given)
            again = tensors_of(functional_call(twin, state, args, kwargs))
            if self._is_same(again):
                return None
            return failures.pass_differs(compiled=self._model is not model, outside=self._within)

    def _is_same(self, again: list[Tensor]) -> bool:
        pairs = [(a, b) for a, b in zip(self._outputs, again, strict=False) if a.is_floating_point()]
        if len(again) != len(self._outputs) or any(a.shape != b.shape for a, b in pairs):
            return False
        size = sum(_norm(a) for a, _ in pairs)
        apart = sum(_norm(a - b.detach()) for a, b in pairs)
        return not apart > (SAME if self._within else APART) * size

    def _transformed(self, model: nn.Module, params: Params) -> LeaveoutError | None:
        """Take the gradient of the outputs as scoring does, in evaluation mode; they must follow the parameters."""
        from leaveout.task.forward import Called  # takes long, and is no part of recording

        args, kwargs = _copied(self._given)

        def rule(called: nn.Module, _batch: Any) -> tuple[Tensor, None]:
            floating = [tensor for tensor in tensors_of(called(*args, **kwargs)) if tensor.is_floating_point()]
            order = torch.Generator().manual_seed(0)
            weights = [torch.randn(t.shape, generator=order).to(t) for t in floating]
            return sum_of((tensor * weight).sum() for tensor, weight in zip(floating, weights, strict=True)), None

        called = Called(model, rule)
        try:
            found = grad(lambda p: called.pure(p, None, frozenset())[0][0])(params)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the model raises is why it cannot be scored
            return failures.not_transformed(first_line(error), self._names)
        floating = any(tensor.is_floating_point() for tensor in self._outputs)
        if floating and not any(bool(tensor.any()) for tensor in found.values()):
            return failures.outputs_stay()
        return None


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
    """Return the tensors in a model's inputs or outputs, which may nest tuples, lists and dicts.

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


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)))


def _copied(nest: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), nest)


def _holds(given: Tensor, leaf: Tensor) -> bool:
    """Return whether a tensor is a batch's, up to its type, device and shape."""
    if given.numel() != leaf.numel():
        return False
    return torch.equal(given.reshape(-1), leaf.to(given.device, given.dtype).reshape(-1))


def _unrecorded_state() -> Any:
    """Return the states of the generators that a record does not hold: numpy's and Python's."""
    return pickle.dumps(np.random.get_state()), random.getstate()
