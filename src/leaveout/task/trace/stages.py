"""A trace in two stages: one that depends on the first inputs alone and is run once, and one for the other inputs."""

from __future__ import annotations

from typing import Any

from torch import fx


def stages(module: fx.GraphModule, count: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the operations that need only the first ``count`` inputs, and those that also need the others.

    The first stage returns what the second needs of it; the second takes that, followed by the other inputs, and
    returns the trace's results.
    """
    nodes = list(module.graph.nodes)
    *_, output = nodes
    later = {node for node in nodes if node.op == "placeholder"} - set(_inputs(module)[:count])
    for node in nodes:
        if later & set(node.all_input_nodes):
            later.add(node)
    later.add(output)
    # Constants are not passed on: the second stage reads them from the module itself.
    held = [
        node
        for node in nodes
        if node not in later and node.op != "get_attr" and any(user in later for user in node.users)
    ]
    first, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        if node not in later:
            copies[node] = first.node_copy(node, copies.__getitem__)
    first.output([copies[node] for node in held])
    first.eliminate_dead_code()
    second, copies = fx.Graph(), {}
    for node in held:
        copies[node] = second.placeholder(node.name)
        copies[node].meta = node.meta
    for node in nodes:
        if node in later or node.op == "get_attr":
            copies[node] = second.node_copy(node, copies.__getitem__)
    second.eliminate_dead_code()
    return fx.GraphModule(module, first), fx.GraphModule(module, second)


def _inputs(module: fx.GraphModule) -> list[Any]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]
