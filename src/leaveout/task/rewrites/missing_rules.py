"""PyTorch operations computed in another way, because their own derivative or batching rule is missing or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from leaveout.task.batches import leaves
from leaveout.task.rewrites.function_mode import opened
from leaveout.task.rewrites.packing import numbers, packed, unpacked

WRITING = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__")
"""Operators that write to their first argument."""

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
PACKING: dict[Any, Callable] = {torch._pack_padded_sequence: packed, torch._pad_packed_sequence: unpacked}


class WrittenOut(TorchFunctionMode):
    """Composes operations from simpler ones if their own second derivative is wrong (``weight_norm``) or missing."""

    def __torch_function__(
        self, function: Callable, _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Of functions that call others, this one calls attention.
        if function is F.multi_head_attention_forward and (inner := opened(function)):
            with self:
                return inner(*args, **(kwargs or {}))
        return PARTS.get(function, function)(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    others = [d for d in range(v.ndim) if d != dim % v.ndim] if dim != -1 else list(range(v.ndim))
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))


def _hardsigmoid(value: Tensor, inplace: bool = False) -> Tensor:  # noqa: ARG001, FBT - has PyTorch's signature
    return (value / 6 + 0.5).clamp(0, 1)


def _embedding_bag(indices: Tensor, weight: Tensor, offsets: Tensor | None = None, **options: Any) -> Tensor:
    mode = options.get("mode", "mean")
    if indices.ndim != 2 or offsets is not None or options.get("max_norm") is not None or mode == "max":
        return F.embedding_bag(indices, weight, offsets, **options)
    share = torch.ones_like(indices, dtype=weight.dtype)
    if options.get("padding_idx") is not None:
        share = (indices != options["padding_idx"]).to(weight.dtype)
    if mode == "mean":
        share = share / share.sum(1, keepdim=True).clamp(min=1)
    if options.get("per_sample_weights") is not None:
        share = share * options["per_sample_weights"]
    return (share.unsqueeze(2) * F.embedding(indices, weight)).sum(1)


def _multi_margin_loss(
    outputs: Tensor, targets: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None, **options: Any
) -> Tensor:
    if outputs.ndim != 2 or options.get("reduction", "mean") != "none":
        return F.multi_margin_loss(outputs, targets, p, margin, weight, **options)
    place = targets.unsqueeze(1)
    missing = (margin - outputs.gather(1, place) + outputs).clamp(min=0) ** p
    missing = missing.scatter(1, place, 0.0).sum(1) / outputs.shape[1]
    return missing if weight is None else missing * weight[targets]


def _returned(function: Callable) -> Callable:
    """Wrap a function so that ``out=`` is written to afterwards: ``vmap`` has no rule for it (``spectral_norm``)."""

    def call(*args: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        result = function(*args, **options)
        return result if out is None else out.copy_(result)

    return call


def _view(tensor: Tensor, *shape: Any, **options: Any) -> Tensor:
    """Return a view; or a copy, if ``vmap`` has put the entries into another order than the model's own pass does."""
    try:
        return tensor.view(*shape, **options)
    except RuntimeError:
        if options or isinstance(shape[0], torch.dtype):
            raise
        return tensor.reshape(*shape)


PARTS: dict[Callable, Callable] = {
    Tensor.view: _view,
    torch._weight_norm: _weight_norm,
    F.hardsigmoid: _hardsigmoid,
    F.embedding_bag: _embedding_bag,
    F.multi_margin_loss: _multi_margin_loss,
    F.normalize: _returned(F.normalize),
    torch.div: _returned(torch.div),
}


class Batched(TorchFunctionMode):
    """Starts recurrent layers from a state that is batched in the same way as the inputs and weights.

    The layers write to it in place, which ``vmap`` refuses for a state that all examples or models share. They are
    also decomposed into their operations, because ``vmap`` has no rule for the whole layer. The decomposition has no
    dropout between layers, so outside of transforms, where draws are noted, the layers are left whole.

    ``packs`` says whether sequences were packed inside this context.
    """

    packs = False

    def __torch_function__(
        self, function: Callable, _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in PACKING:
            self.packs = True
            return PACKING[function](*args, **kwargs)
        if getattr(function, "__name__", "") not in RECURRENT or len(args) != 9:
            return function(*args, **kwargs)
        is_packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()
        if not any(map(_is_wrapped if is_packed else _is_batched, leaves(args))):
            # Without fused kernels, draws have the same shape for packed sequences even if all lengths are equal.
            with _no_fused_kernels() if is_packed else nullcontext():
                return function(*args, **kwargs)
        at = 2 if is_packed else 1  # (inputs, sizes, state, weights, ...) or (inputs, state, weights, ...)
        sizes = map(numbers, args[1:at])
        args = (args[0], *sizes, _varied(args[at], [args[0], *args[at + 1]]), *args[at + 1 :])
        packet = getattr(torch.ops.aten, function.__name__)
        with _no_fused_kernels():  # they cannot be decomposed
            return (packet.data if is_packed else packet.input).decompose(*args, **kwargs)


def _is_wrapped(leaf: Any) -> bool:
    """Say whether a transform wraps this tensor."""
    return isinstance(leaf, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(leaf)


def _is_batched(leaf: Any) -> bool:
    """Say whether this tensor is batched by ``vmap``."""
    functorch = torch._C._functorch
    while isinstance(leaf, Tensor) and functorch.is_functorch_wrapped_tensor(leaf):
        if functorch.is_batchedtensor(leaf):
            return True
        leaf = functorch.get_unwrapped(leaf)
    return False


def _varied(state: Any, sources: list[Tensor]) -> Any:
    """Return the state batched in every dimension in which one of the sources is, with the same values."""
    zero = sum(source.flatten()[0] for source in sources) * 0
    return tuple(part + zero for part in state) if isinstance(state, tuple | list) else state + zero


class Passing(WrittenOut):
    """Makes stop-gradients stop a gradient only once: ``detach``, ``.data``, ``no_grad`` and ``padding_idx`` of an
    embedding hide a value from the gradient that training takes, but not from that gradient's forward-mode derivative.
    """

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if stops(function):
            return _Stop.apply(args[0])
        if _writes(function) and not torch.is_grad_enabled():
            args, kwargs = (args[0], *_stopped(args[1:])), _stopped(kwargs or {})
            with torch.enable_grad():  # what is written to stays the same tensor
                return super().__torch_function__(function, types, args, kwargs)
        function = STOPPED.get(function, function)
        if not is_hidden(function):
            return super().__torch_function__(function, types, args, kwargs)
        with torch.enable_grad():
            value = super().__torch_function__(function, types, args, kwargs)
        return _Stop.apply(value) if isinstance(value, Tensor) and value.is_floating_point() else value


class Unstopped(TorchFunctionMode):
    """Ignores ``detach``, ``.data``, ``no_grad`` and ``padding_idx``: derivatives are those of the values."""

    def __torch_function__(
        self, function: Callable, _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if stops(function):
            return args[0]
        function = WHOLE.get(function, function)
        with torch.enable_grad():
            return function(*args, **(kwargs or {}))


def padding_of(_indices: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> int | None:
    """Return the row of an embedding that gets no gradient, given the arguments of ``F.embedding``."""
    return None if padding_idx is None else padding_idx % len(weight)


def whole_embedding(indices: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """Look up an embedding in which every row has a gradient."""
    return F.embedding(indices, weight)


def stopped_embedding(indices: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Look up an embedding with a stop-gradient in place of ``padding_idx``."""
    value, row = F.embedding(indices, weight), padding_of(indices, weight, *args, **kwargs)
    return value if row is None else torch.where((indices == row).unsqueeze(-1), _Stop.apply(value), value)


def _innermost(embedding: Callable) -> Callable:
    """Return the same function with the arguments of ``torch.embedding``, which ``F.embedding`` calls."""

    def called(weight: Tensor, indices: Tensor, padding_idx: int = -1, *_: Any, **__: Any) -> Tensor:
        return embedding(indices, weight, None if padding_idx < 0 else padding_idx)

    return called


WHOLE = {F.embedding: whole_embedding, torch.embedding: _innermost(whole_embedding)}
STOPPED = {F.embedding: stopped_embedding, torch.embedding: _innermost(stopped_embedding)}


def stops(function: Callable) -> bool:
    """Say whether a function returns its tensor without its autograd history."""
    return function in (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]


def is_hidden(function: Callable) -> bool:
    """Say whether a call is made with gradients disabled; the calls that enable or disable them do not count."""
    name = getattr(function, "__name__", "")
    return not torch.is_grad_enabled() and bool(name) and not name.startswith(("_", "set_", "is_"))


def _writes(function: Callable) -> bool:
    """Say whether a function writes to its first argument.

    >>> _writes(Tensor.add_), _writes(Tensor.__setitem__), _writes(Tensor.add)
    (True, True, False)
    """
    name = getattr(function, "__name__", "")
    return name in WRITING or (name.endswith("_") and not name.startswith("_"))


def _stopped(values: Any) -> Any:
    return tree_map_only(Tensor, lambda t: _Stop.apply(t) if t.is_floating_point() else t, values)


class _Stop(torch.autograd.Function):
    """The identity, with a zero gradient in reverse mode and the identity's derivative in forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)

    @staticmethod
    def jvp(_ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()


@contextmanager
def _no_fused_kernels() -> Iterator[None]:
    """Switch oneDNN off; PyTorch's own context manager for it also sets TF32, and warns about that on a CPU."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def quiet_loops() -> Iterator[None]:
    """Keep ``vmap`` from warning about operations done one by one: they are correct, and users cannot change it."""
    torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]


@contextmanager
def batched() -> Iterator[None]:
    """Let ``vmap`` batch every operation: some are written out, the others done one by one."""
    with WrittenOut(), quiet_loops():
        yield


@contextmanager
def plain_attention() -> Iterator[None]:
    """Switch off the fused transformer layers of evaluation mode, which have no derivatives."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
