"""Products whose transpose is wanted, multiplied the other way round: (A·B)ᵀ = Bᵀ·Aᵀ, without a copy."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def without_copies(module: fx.GraphModule) -> fx.GraphModule | None:
    """Return the same operations with each copy of a transposed product as a product, or None if there is none.

    Libraries for matrices usually round both alike. Whoever needs that to be so has to compare.
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
    """Return the product whose transpose this operation copies into the usual order, if it does that."""
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
