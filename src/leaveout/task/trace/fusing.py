"""Sums of products with one pass over the elements per product: a·b + c is one operation.

The last digit may round differently. So only traces that may do so are fused, and values on which the side of a kink
depends never are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from leaveout.task.trace.layout import deciding_nodes

aten = torch.ops.aten

SMALLEST = 1 << 14
"""The number of elements below which a pass takes no longer than its call."""


class Product(NamedTuple):
    """A product of two tensors and a number, and the operation that computes it."""

    node: fx.Node
    factors: tuple[fx.Node, fx.Node]
    scale: float = 1.0


def fuse(module: fx.GraphModule) -> None:
    """Replace every large sum that has products by one operation per product."""
    graph = module.graph
    kept = deciding_nodes(graph)
    for node in reversed(list(graph.nodes)):
        inside = len(node.users) == 1 and _is_sum(next(iter(node.users)), node) and not kept & set(node.users)
        if not _is_sum(node, node) or node in kept or inside:
            continue
        terms = list(_terms(node, kept, node))
        products = [term for term in terms if isinstance(term, Product)]
        others = [term for term in terms if isinstance(term, fx.Node)]
        if products:
            node.replace_all_uses_with(_added(node, products, others))
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()


def _terms(node: fx.Node, kept: set[fx.Node], total: fx.Node) -> Iterator[Product | fx.Node]:
    """Yield the terms of a sum, including those of sums that it alone uses."""
    given: tuple[Any, ...] = node.args
    for term in given:
        alone = len(term.users) == 1 and term not in kept and len({*given}) == len(given)
        if alone and _is_sum(term, total):
            yield from _terms(term, kept, total)
        else:
            yield (_product(term) if alone else None) or term


def _product(node: fx.Node) -> Product | None:
    given: tuple[Any, ...] = node.args
    if node.target is aten.mul.Tensor and all(_number(each) is not None for each in given):
        return Product(node, (given[0], given[1]))
    scaled = node.target in (aten.mul.Scalar, aten.mul.Tensor) and isinstance(given[1], int | float)
    if scaled and len(given[0].users) == 1 and (inner := _product(given[0])):
        return Product(node, inner.factors, inner.scale * given[1])
    return None


def _added(node: fx.Node, products: list[Product], others: list[fx.Node]) -> fx.Node:
    """Build the sum, starting with the terms that are not products, the smallest first."""
    graph = node.graph
    others.sort(key=lambda other: other.meta["val"].numel())
    first, *more = others or [products.pop(0).node]
    with graph.inserting_before(node):
        for other in more:
            first = _like(node, graph.call_function(aten.add.Tensor, (first, other)))
        for _, factors, scale in products:
            value: dict[str, Any] = {} if scale == 1 else {"value": scale}
            first = _like(node, graph.call_function(aten.addcmul.default, (first, *factors), value))
    return first


def _like(node: fx.Node, new: fx.Node) -> fx.Node:
    new.meta["val"] = node.meta["val"]
    return new


def _is_sum(node: fx.Node, total: fx.Node) -> bool:
    """Say whether it is a large sum of floating-point tensors of one dtype, with the shape of the total."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    values = [_number(each) for each in (total, node, *node.args)]
    tensors = [value for value in values if value is not None]
    alike = len(tensors) == len(values) and len({tensor.dtype for tensor in tensors}) == 1
    return alike and tensors[0].shape == tensors[1].shape and tensors[0].numel() >= SMALLEST


def _number(node: Any) -> Tensor | None:
    """Return the floating-point tensor that an operation returned while it was traced; None for any other value."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) and value.is_floating_point() else None
