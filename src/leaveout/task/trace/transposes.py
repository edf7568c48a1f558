"""Transposed products computed as (A·B)ᵀ = Bᵀ·Aᵀ, which saves the copy that transposing A·B takes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def without_copies(module: fx.GraphModule) -> fx.GraphModule | None:
    """Return the same trace without copies of transposed products; None if it has none.

    The two forms usually round alike, but that is not guaranteed: callers that need the same bits have to compare.
    """
    if not any(_product_of(node) for node in module.graph.nodes):
        return None
    module = fx.GraphModule(module, copy.deepcopy(module.graph))
    for node in [node for node in module.graph.nodes if _product_of(node)]:
        node.replace_all_uses_with(_other_way_round(node))
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _product_of(node: fx.Node) -> fx.Node | None:
    """Return the product A·B if this operation copies its transpose; None for any other operation."""
    if node.target is not aten.clone.default or not node.meta["val"].is_contiguous():
        return None
    turned: Any = node.args[0]
    value = turned.meta["val"]
    if turned.target is not aten.transpose.int or value.ndim != 3 or {d % 3 for d in turned.args[1:]} != {1, 2}:
        return None
    product = turned.args[0]
    alone = len(turned.users) == 1 and len(product.users) == 1
    return product if product.target is aten.bmm.default and alone else None


def _other_way_round(node: fx.Node) -> fx.Node:
    """Insert Bᵀ·Aᵀ before the copy of (A·B)ᵀ, and return it."""
    product: Any = _product_of(node)
    left, right = product.args
    with node.graph.inserting_before(node):
        factors = tuple(_transposed(factor) for factor in (right, left))
        result = node.graph.call_function(aten.bmm.default, factors)
    result.meta["val"] = node.meta["val"]
    return result


def _transposed(node: fx.Node) -> fx.Node:
    turned = node.graph.call_function(aten.transpose.int, (node, 1, 2))
    turned.meta["val"] = node.meta["val"].transpose(1, 2)
    return turned
