"""Products that are added to something, in one pass over their elements: a·b + c as one operation.

Rounding may differ in the last place, so only traces that may round differently are fused, and never what decides on
which side of a kink a value is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from leaveout.task.trace.layout import deciding_nodes

aten = torch.ops.aten

SMALLEST = 1 << 14
"""Elements below which a pass costs no more than its call."""


def fuse(module: fx.GraphModule) -> None:
    """Make one operation of each product of tensors and the sum that alone uses it."""
    deciding = deciding_nodes(module.graph)
    for node in module.graph.nodes:
        if node.target is not aten.add.Tensor or node.kwargs or node in deciding:
            continue
        terms: tuple[Any, ...] = node.args
        product = next((term for term in terms if _is_fusible(term, node)), None)
        if product is not None:
            other = terms[1] if product is terms[0] else terms[0]
            node.target, node.args = aten.addcmul.default, (other, *product.args)
    module.graph.eliminate_dead_code()
    module.recompile()


def _is_fusible(term: Any, total: fx.Node) -> bool:
    """Say whether it is a large product of two tensors that only the sum uses."""
    if not isinstance(term, fx.Node) or term.target is not aten.mul.Tensor or len(term.users) > 1:
        return False
    values = [each.meta.get("val") if isinstance(each, fx.Node) else None for each in (*total.args, *term.args, total)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    alike = len(tensors) == len(values) and len({tensor.dtype for tensor in tensors}) == 1
    return alike and tensors[-1].is_floating_point() and tensors[-1].numel() >= SMALLEST
