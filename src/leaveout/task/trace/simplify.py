"""A trace's operations made fewer: the same results, to the last bit.

No operation of a trace may write into a tensor. Then two operations of the same name and arguments have the same value,
and a copy can be replaced by what was copied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx

from leaveout.task.rewrites.products import product

aten = torch.ops.aten

VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.transpose.int,
    aten.t.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
"""Operations whose result is a view that begins where their operand's memory begins."""

COPIES = {aten.clone.default: 0, aten._to_copy.default: 0, aten.copy.default: 1}
"""Operations that copy one of their arguments, with its position."""

FILLED = {aten.ones_like.default: 1, aten.new_ones.default: 1, aten.zeros_like.default: 0, aten.new_zeros.default: 0}
"""Operations whose result holds one number, whatever the values of the tensor that it is shaped like."""

UNITS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar)
"""Operations that change nothing with 1 as their second argument."""

ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
"""Operations that make zeros."""

LINEAR = (
    aten.neg.default,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.sum.dim_IntList,
    aten.clone.default,
    aten.gelu_backward.default,
)
"""Operations that are linear in their first argument, besides views."""

LINEAR_IN = {
    **dict.fromkeys((*VIEWS, *LINEAR), (0,)),
    aten.where.self: (1, 2),
    aten.scatter_add.default: (0, 3),
}
"""Operations, and the arguments in which they are linear: the result is zero if these are."""

PRODUCTS = (aten.mul.Tensor, aten.mm.default, aten.bmm.default)
"""Operations whose result is zero if one of their first two arguments is zero."""

LARGEST = 1 << 14
"""The most elements that a constant has; larger ones are computed at every call."""

FUNCTIONS = {
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.neg.default: torch.neg,
    aten.exp.default: torch.exp,
    aten.log.default: torch.log,
    aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid,
    aten.relu.default: torch.relu,
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.sum.dim_IntList: torch.sum,
    aten.where.self: torch.where,
    aten.transpose.int: torch.transpose,
    aten.t.default: torch.t,
    aten.permute.default: torch.permute,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.squeeze.dim: torch.squeeze,
    aten.squeeze.dims: torch.squeeze,
}
METHODS = {aten.view.default: "view", aten.expand.default: "expand", aten.reshape.default: "reshape"}
"""Operations that PyTorch's own Python functions and methods call sooner than its table of operators does."""


def simplify(module: fx.GraphModule) -> None:
    """Drop operations without effect and zeros in sums; compute repeated operations once, and constants now."""
    seen: dict[str, fx.Node] = {}
    zeros: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        _forget_values(node)
        if _is_zero(node, zeros):
            zeros.add(node)
        # Nodes print as their unique names.
        equal = _equal(node, zeros) or seen.setdefault(repr((node.target, node.args, node.kwargs)), node)
        if equal is not node:
            node.replace_all_uses_with(equal)
    module.graph.eliminate_dead_code()
    _fold_constants(module)
    module.recompile()


def call_directly(module: fx.GraphModule) -> Callable[..., list[Tensor]]:
    """Return the trace as a function whose operations are quick to call; it cannot be simplified afterwards."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
        elif node.op == "call_function" and node.target in METHODS and not node.kwargs:
            node.op, node.target = "call_method", METHODS[node.target]
    module.recompile()
    return module.forward


def kind(tensor: Tensor) -> tuple:
    """Describe a tensor's layout: two tensors with the same layout have the same shape, strides, dtype and device."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _alike(node: Any, other: fx.Node) -> bool:
    value, wanted = (each.meta.get("val") if isinstance(each, fx.Node) else None for each in (node, other))
    return isinstance(value, Tensor) and isinstance(wanted, Tensor) and kind(value) == kind(wanted)


def _equal(node: fx.Node, zeros: set[fx.Node]) -> fx.Node | None:
    """Return an earlier node with the same value and layout; None if there is no such node."""
    given: tuple[Any, ...] = node.args
    same: Any = None
    if node.target in (aten.detach.default, aten.alias.default):
        return given[0]
    if node.target in COPIES:
        same = given[COPIES[node.target]]
    elif node.target in UNITS and type(given[1]) in (int, float) and given[1] == 1:
        same = given[0]
    elif node.target is aten.mul.Tensor and (ones := [one for one in given if _is_ones(one)]):
        same = given[1] if ones[0] is given[0] else given[0]
    elif node.target is aten.add.Tensor and not node.kwargs:
        same = next((term for zero, term in (given[:2], given[1::-1]) if zero in zeros), None)
    elif node.target in VIEWS:
        return _unviewed(node)
    return same if _alike(same, node) else None


def _is_ones(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.full.default and bool(node.args[1] == 1)


def _unviewed(node: fx.Node) -> fx.Node | None:
    """Return the earliest tensor in a chain of views that has the same layout as its end."""
    first, here = None, node
    while here.target in VIEWS:
        here = here.args[0]  # type: ignore[assignment]
        if _alike(here, node):
            first = here
    return first


def _forget_values(node: fx.Node) -> None:
    """Replace an operation that fills the shape of its operand with a number, so that the operand is not computed."""
    made, given = node.meta.get("val"), node.args
    if node.target in FILLED:
        value: Any = FILLED[node.target]
    elif node.target is aten.pow.Tensor_Scalar and given[1] == 0:
        value = 1
    elif node.target in (aten.fill.Scalar, aten.full_like.default):
        value = given[1]
    else:
        return
    if isinstance(made, Tensor) and made.is_contiguous():
        node.target, node.args = aten.full.default, (list(made.shape), value)
        node.kwargs = {"dtype": made.dtype, "device": made.device, "pin_memory": False}


def _is_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Say whether the result is zero, like the tangent of an input that does not move, and products with it."""
    target: Any = node.target
    args: tuple[Any, ...] = node.args
    if target in ZEROS:
        return True
    if target is aten.full.default:
        return args[1] == 0
    if target in LINEAR_IN:
        return all(args[place] in zeros for place in LINEAR_IN[target])
    if target in PRODUCTS or (target is product() and args[2] is None):
        return args[0] in zeros or args[1] in zeros
    if target is aten.pow.Tensor_Scalar:
        return args[0] in zeros and args[1] > 0
    if target is aten.sub.Tensor:  # a tensor from itself
        return args[0] is args[1] and not node.kwargs
    if target is aten.convolution.default:
        return args[0] in zeros and args[2] is None
    return target is operator.getitem and _is_zero_gradient(args[0], args[1], zeros)


def _is_zero_gradient(gradients: Any, which: Any, zeros: set[fx.Node]) -> bool:
    """Say whether it is the gradient of a convolution's kernel, for images that are zero."""
    return gradients.target is aten.convolution_backward.default and which == 1 and gradients.args[1] in zeros


@torch.no_grad()
def _fold_constants(module: fx.GraphModule) -> None:
    """Compute now what depends on no input."""
    graph = module.graph
    values: dict[fx.Node, Tensor] = {}
    for node in graph.nodes:
        if _is_constant(node, values):
            given, named = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*given, **named)
    for node, value in values.items():
        if all(user in values for user in node.users):
            continue
        name = next(name for i in count() if not hasattr(module, name := f"constant_{i}"))
        module.register_buffer(name, value)
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        constant.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(constant, lambda user: user not in values)
    graph.eliminate_dead_code()


def _is_constant(node: fx.Node, values: dict[fx.Node, Tensor]) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    made = node.meta.get("val")
    small = isinstance(made, Tensor) and made.numel() <= LARGEST
    drawn = torch.Tag.nondeterministic_seeded in node.target.tags
    return small and not drawn and all(source in values for source in node.all_input_nodes)
