"""Elementwise operations that write over an operand that is not needed any more: the same results to the last bit.

It saves time because memory that has just been read is in the cache, and new memory is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from leaveout._util.trees import memory
from leaveout.task.batches import leaves
from leaveout.task.trace.simplify import kind

SMALLEST = 1 << 12
"""The number of elements below which an operation takes no longer than its call."""


class Observed(NamedTuple):
    """What a node of a trace returned: its kind, if it is one tensor, and the blocks of memory that it occupies.

    Blocks are numbered in the order of their first use; a view occupies the block of the tensor that it is a view of.
    """

    kind: tuple | None
    blocks: frozenset[int]


Observations: TypeAlias = dict[fx.Node, Observed]


class Observer(fx.Interpreter):
    """Runs a trace once and notes what each node returned.

    Tensors that exist at the same time share memory if their memory begins at the same address. A node's results can
    share memory only with its operands, so only these are compared.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.observed: Observations = {}
        self._addresses: dict[fx.Node, dict[int, int]] = {}
        self._count = 0

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and note what it returned."""
        result = super().run_node(n)
        known = {address: block for given in n.all_input_nodes for address, block in self._addresses[given].items()}
        own = {}
        for leaf in leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                address = memory(leaf)
                self._count += address not in known
                own[address] = known.setdefault(address, self._count)
        self._addresses[n] = own
        single = kind(result) if own and isinstance(result, Tensor) else None
        self.observed[n] = Observed(single, frozenset(own.values()))
        return result


@torch.no_grad()
def observe(module: fx.GraphModule, inputs: list[Any]) -> tuple[list[Tensor], Observations]:
    """Run a trace; return its results and what each of its nodes returned."""
    observer = Observer(module)
    return observer.run(*inputs), observer.observed


def write_in_place(module: fx.GraphModule, observed: Observations) -> fx.GraphModule | None:
    """Return the same trace with operations in place, or None if there are none."""
    nodes: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, nodes))
    last = _last_uses(module.graph, observed)
    same: dict[int, int] = {}  # a result's block is merged with that of the operand it is written over
    for node in module.graph.nodes:
        writing = _writing(node.target) if node.op == "call_function" else None
        if writing is not None and (operand := _used_up(node, writing[0], observed, last, same)):
            nodes[node].target, name = writing
            nodes[node].kwargs = {**nodes[node].kwargs, name: nodes[operand]}
            (old,), (new,) = (_blocks(each, observed, same) for each in (operand, node))
            same[new], last[old] = old, last[new]
    return fx.GraphModule(module, graph) if same else None


def _used_up(
    node: fx.Node,
    writing: torch._ops.OpOverload,
    observed: Observations,
    last: dict[int, fx.Node | None],
    same: dict[int, int],
) -> fx.Node | None:
    """Return an operand of the result's shape and layout whose memory nothing else needs afterwards; else None."""
    made = observed[node].kind
    if made is None or math.prod(made[0]) < SMALLEST or not _has_kernel(writing, made[3]):
        return None
    for operand in node.all_input_nodes:
        own = _blocks(operand, observed, same)
        rest = (each for each in (*node.all_input_nodes, node) if each is not operand)
        others = set().union(*(_blocks(each, observed, same) for each in rest))
        if observed[operand].kind == made and not own & others and all(last[block] is node for block in own):
            return operand
    return None


def _blocks(node: fx.Node, observed: Observations, same: dict[int, int]) -> set[int]:
    """Return the blocks of memory that a node's result occupies, after merging."""
    return {_first(same, block) for block in observed[node].blocks}


def _first(same: dict[int, int], block: int) -> int:
    while block in same:
        block = same[block]
    return block


def _last_uses(graph: fx.Graph, observed: Observations) -> dict[int, fx.Node | None]:
    """Return the last node that reads each block of memory; None for inputs, constants and results, which must stay."""
    last: dict[int, fx.Node | None] = {}
    for node in graph.nodes:
        for given in node.all_input_nodes:
            last.update(dict.fromkeys(observed[given].blocks, node))
    for node in graph.nodes:
        foreign = node.op in ("placeholder", "get_attr")
        kept = [node] if foreign else node.all_input_nodes if node.op == "output" else []
        last.update(dict.fromkeys((block for each in kept for block in observed[each].blocks), None))
    return last


@cache
def _writing(target: Any) -> tuple[torch._ops.OpOverload, str] | None:
    """Return an elementwise operation's ``out=`` variant and the name of that argument; None if it has none."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    if target._overloadname == "Scalar":  # it takes a number as well, and has a kernel
        target = getattr(target.overloadpacket, "Tensor", target)
    for other in _overloads(target):
        given = [(arg.name, str(arg.type)) for arg in other._schema.arguments if not arg.is_out]
        outs = [arg.name for arg in other._schema.arguments if arg.is_out]
        if len(outs) == 1 and given == [(arg.name, str(arg.type)) for arg in target._schema.arguments]:
            return other, outs[0]
    return None


def _overloads(target: torch._ops.OpOverload) -> Iterator[torch._ops.OpOverload]:
    packet = target.overloadpacket
    return (getattr(packet, name) for name in packet.overloads())


@cache
def _has_kernel(target: torch._ops.OpOverload, device: torch.device) -> bool:
    """Say whether a device has its own kernel for it; without one PyTorch computes a new result and copies it."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)
