"""Traced operations on images, laid out as a processor likes them.

Convolutions and pooling are quicker if the channels of a pixel are adjacent in memory (channels last). For the gradient
of a kernel for each example, ``vmap`` runs one convolution with a group per example; one matrix product per example is
quicker. Nothing else changes: the same sums are taken, in another order. Values that decide at a kink, such as a ReLU's
input, keep every bit, because the derivative on the other side of the kink is another one.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import pad

CACHE = 1 << 20
"""Bytes of overlapping windows that are copied at a time, so that they are in the cache when they are multiplied."""

aten = torch.ops.aten

POOL = aten.max_pool2d_with_indices.default

IMAGES = {
    aten.convolution.default: (0, 1),
    aten.convolution_backward.default: (0, 1, 2),
    aten.max_pool2d_with_indices_backward.default: (0, 7),
    aten.threshold_backward.default: (0, 1),
}
"""Operations on images, and the positions of the images among their arguments."""

KINKED = {"threshold", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink", "elu"}
KINKED |= {"_prelu_kernel", "huber_loss", "smooth_l1_loss"}
"""Operations with a kink: their backward operations compare the input with it."""

DECIDING = ("gt", "ge", "lt", "le", "eq", "ne", "sgn", "sign", "max", "min", "amax", "amin", "argmax", "argmin", "sort")
"""Operations that compare."""


def for_images(module: fx.GraphModule, whole: bool = False) -> fx.GraphModule | None:
    """Return the same operations in the new layout, not simplified yet; None if there is nothing to gain.

    With ``whole``, values that decide at a kink are laid out too, and may round to its other side.
    """
    if not any(node.target is aten.convolution.default and _is_image(node) for node in module.graph.nodes):
        return None
    if any(node.target is aten.as_strided.default for node in module.graph.nodes):  # it depends on the layout
        return None
    module = fx.GraphModule(module, copy.deepcopy(module.graph))
    deciding = set() if whole else deciding_nodes(module.graph)
    for node in module.graph.nodes:
        if node.op == "call_function" and node not in deciding:
            _lay_out(node)
            _join(node, deciding)
        elif node.op == "output":  # callers expect the usual layout
            results: Any = node.args[0]
            node.args = (_wrapped(node, torch.Tensor.contiguous, results),)
    _share_windows(module.graph)
    return module


def pool_by_channels(module: fx.GraphModule) -> None:
    """Max-pool images with their channels side by side, which is quicker and changes no bit: maxima are not rounded."""
    for node in list(module.graph.nodes):
        if node.target is POOL and _is_image(node.args[0]):
            node.update_arg(0, _wrapped(node, _channels_last, [node.args[0]])[0])
            for part in list(node.users):
                with module.graph.inserting_after(part):
                    usual = _noted(module.graph.call_function(torch.Tensor.contiguous, (part,)), part.meta["val"])
                part.replace_all_uses_with(usual, lambda user, usual=usual: user is not usual)
    module.recompile()


def deciding_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Find the values on which the side of a kink depends: all that a comparison or a maximum is computed from."""
    deciding: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        given: tuple[Any, ...] = node.args
        name = node.target.__name__.split(".")[0] if callable(node.target) else ""
        roots: Sequence[Any] = ()
        if node in deciding or name in DECIDING or node.target is POOL:
            roots = node.all_input_nodes
        elif name.removesuffix("_backward") in KINKED:
            roots = given[1:]
        deciding.update(root for root in roots if isinstance(root, fx.Node))
    return deciding


def _lay_out(node: fx.Node) -> None:
    """Give one operation its images with channels last, or replace it by another operation."""
    given: tuple[Any, ...] = node.args
    if node.target in (aten.view.default, aten._unsafe_view.default):
        node.target = aten.reshape.default  # a view may not be possible in the new layout
    elif _moves_nothing(node) and node.meta["val"].shape == given[0].meta["val"].shape:
        node.replace_all_uses_with(given[0])
    elif node.target is aten.convolution_backward.default and (kernels := _example_kernels(node)) is not None:
        (kernel,) = (user for user in node.users if user.target is operator.getitem)
        kernel.replace_all_uses_with(kernels)
    elif node.target is aten.threshold_backward.default and _is_stack(node):
        _lay_out_stack(node)
    elif node.target is aten.scatter_add.default and (spread := _pool_backward(node)) is not None:
        node.replace_all_uses_with(spread)
    elif node.target is torch.Tensor.contiguous:  # no kink depends on it here
        node.replace_all_uses_with(given[0])
    elif node.target in IMAGES:
        if node.target is aten.max_pool2d_with_indices_backward.default and _is_image(given[1]):
            node.update_arg(1, _room_for(node, given[1].meta["val"]))
        for place in IMAGES[node.target]:
            if _is_image(given[place]):
                node.update_arg(place, _wrapped(node, _channels_last, [given[place]])[0])


def _join(node: fx.Node, deciding: set[fx.Node]) -> None:
    """Lay out all images of an elementwise operation if some of them already are.

    If its operands have different layouts, their elements are read one by one, which takes three times as long. An
    image is laid out only once for several operations, since equal operations are merged later.
    """
    if not (isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags):
        return
    for given in node.all_input_nodes:
        if given in deciding and _is_image(given) and given.meta["val"].shape == node.meta["val"].shape:
            node.replace_input_with(given, _wrapped(node, _channels_last, [given])[0])


def _lay_out_stack(node: fx.Node) -> None:
    """Lay out an operation on images that have an extra dimension from ``vmap``: merged before it, split after it."""
    graph, whole = node.graph, node.meta["val"]
    flat = whole.flatten(0, 1)
    given: tuple[Any, ...] = node.args
    with graph.inserting_before(node):
        images = [
            _noted(graph.call_function(aten.reshape.default, (_source(each), list(flat.shape))), flat)
            for each in given[:2]
        ]
    node.args = (*_wrapped(node, _channels_last, images), *given[2:])
    node.meta["val"] = flat
    with graph.inserting_after(node):
        shaped = _noted(graph.call_function(aten.reshape.default, (node, list(whole.shape))), whole)
    node.replace_all_uses_with(shaped, lambda user: user is not shaped)


def _pool_backward(node: fx.Node) -> fx.Node | None:
    """Replace a scatter of slopes to the chosen places of max-pooling by its backward operation, with channels last."""
    given: tuple[Any, ...] = node.args
    zeros, _, index, values = given
    places = _pooled(_source(index))
    pool = places.args[0] if places.target is operator.getitem else places
    whole = node.meta["val"]
    is_flat = pool.target is POOL and whole.shape == pool.args[0].meta["val"].flatten(2).shape
    if not (is_flat and _is_image(pool.args[0]) and _is_zeros(zeros)):
        return None
    graph, image = node.graph, places.meta["val"]
    kernel, *options = pool.args[1:]
    options += [kernel, [0, 0], [1, 1], False][len(options) :]
    with graph.inserting_before(node):
        slopes = _noted(graph.call_function(aten.reshape.default, (_source(values), list(image.shape))), image)
    laid_out = _wrapped(node, _channels_last, [slopes, places])
    room = _room_for(node, pool.args[0].meta["val"])
    with graph.inserting_before(node):
        backward = aten.max_pool2d_with_indices_backward.default
        made = graph.call_function(backward, (laid_out[0], room, kernel, *options, laid_out[1]))
        return _noted(graph.call_function(aten.reshape.default, (made, list(whole.shape))), whole)


def _is_zeros(node: Any) -> bool:
    """Say whether it is a tensor of zeros, computed at every call or stored as a constant."""
    if node.op == "get_attr":
        return not bool(getattr(node.graph.owning_module, node.target).any())
    return node.target is aten.full.default and node.args[1] == 0


def _room_for(node: fx.Node, images: Tensor) -> fx.Node:
    """Insert an uninitialised tensor in place of images of which only the shape is used."""
    options: dict[str, Any] = {"dtype": images.dtype, "device": images.device, "memory_format": torch.channels_last}
    with node.graph.inserting_before(node):
        return _noted(node.graph.call_function(torch.empty, (tuple(images.shape),), options), images)


def _is_stack(value: fx.Node) -> bool:
    """Say whether it is a stack of images with an extra dimension, and one of the first two dimensions is 1."""
    tensor = value.meta.get("val")
    return isinstance(tensor, Tensor) and tensor.ndim == 5 and 1 in tensor.shape[:2] and _has_layout(tensor)


def _is_image(value: Any) -> bool:
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(tensor, Tensor) and tensor.ndim == 4 and _has_layout(tensor)


def _has_layout(tensor: Tensor) -> bool:
    # In 16 bits, rounding alone may exceed the tolerance with which results are compared.
    return tensor.device.type == "cpu" and tensor.dtype not in (torch.float16, torch.bfloat16)


def _channels_last(images: Tensor) -> Tensor:
    return images.to(memory_format=torch.channels_last)


def _wrapped(before: fx.Node, function: Any, values: Sequence[fx.Node]) -> list[fx.Node]:
    with before.graph.inserting_before(before):
        made = [before.graph.call_function(function, (_pooled(value),)) for value in values]
        return [_noted(node, value.meta["val"]) for node, value in zip(made, values, strict=True)]


def _pooled(value: Any) -> Any:
    """Return the result of pooling before it was copied into the usual layout."""
    return value.args[0] if value.target is torch.Tensor.contiguous else value


def _noted(node: fx.Node, value: Tensor) -> fx.Node:
    node.meta["val"] = value
    return node


def _example_kernels(node: fx.Node) -> fx.Node | None:
    """Insert the gradients of a kernel for many examples, in place of a convolution with a group per example."""
    given: tuple[Any, ...] = node.args
    slopes, images, kernels, _, stride, padding, dilation, transposed, _, groups, wanted = given
    if groups == 1 or transposed or list(wanted) != [False, True, False] or not _is_image(images):
        return None
    (count, wide, *size), (_, tall, *result) = images.meta["val"].shape, slopes.meta["val"].shape
    if count != 1:
        return None
    graph, shape = node.graph, tuple(kernels.meta["val"].shape)
    with graph.inserting_before(node):
        images = graph.call_function(aten.reshape.default, (_source(images), [groups, wide // groups, *size]))
        slopes = graph.call_function(aten.reshape.default, (_source(slopes), [groups, tall // groups, *result]))
        pairs = [list(each) * (2 // len(each)) for each in (stride, padding, dilation)]  # one number may stand for both
        made = graph.call_function(example_kernels, (images, [slopes], shape, *pairs))
        return _noted(graph.call_function(operator.getitem, (made, 0)), node.meta["val"][1])


def _share_windows(graph: fx.Graph) -> None:
    """Merge computations of kernel gradients from the same images, so that their windows are copied once."""
    seen: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not example_kernels:
            continue
        images, slopes, *options = node.args
        key = repr((images.args, options))
        other = seen.get(key)
        seen[key] = node
        if other is None or _leads_to(other, slopes[0]):
            continue
        others: Any = other.args[1]
        node.args = (images, [*slopes, *others], *options)
        for kernel in list(other.users):
            place: Any = kernel.args[1]
            kernel.args = (node, len(slopes) + place)
        graph.erase_node(other)
    _put_late(graph)


def _put_late(graph: fx.Graph) -> None:
    """Move nodes that precede one of their inputs to the end of the graph, with everything that depends on them."""
    *nodes, output = graph.nodes
    done: set[fx.Node] = set()
    late = [node for node in nodes if not _placed(node, done)]
    while late:
        for node in late:
            output.prepend(node)
        late = [node for node in late if not _placed(node, done)]


def _placed(node: fx.Node, done: set[fx.Node]) -> bool:
    """Say whether all inputs of a node are done; if so, mark it as done too."""
    if not all(given in done for given in node.all_input_nodes):
        return False
    done.add(node)
    return True


def _leads_to(source: fx.Node, node: fx.Node) -> bool:
    """Say whether a value is computed from another one."""
    waiting, seen = [node], set()
    while waiting:
        here = waiting.pop()
        if here is source:
            return True
        waiting += [given for given in here.all_input_nodes if given not in seen]
        seen.update(here.all_input_nodes)
    return False


def _source(node: Any) -> fx.Node:
    """Return the tensor of which this is a reshaped view, with the same elements in the same order."""
    while node.target in (aten.reshape.default, aten.view.default) or _moves_nothing(node):
        node = node.args[0]
    return node


def _moves_nothing(node: Any) -> bool:
    """Say whether it is a permutation that moves only dimensions of size 1."""
    if node.target is not aten.permute.default:
        return False
    shape = node.args[0].meta["val"].shape
    moved = [dim % len(shape) for dim in node.args[1] if shape[dim] > 1]
    return moved == sorted(moved)


def example_kernels(
    images: Tensor,
    slopes: Sequence[Tensor],
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[Tensor]:
    """Compute a kernel's gradient for each image: Σ over the places of its output, slope times the window seen there.

    ``shape`` is that of all kernels together; ``slopes`` may hold those of several kernels with the same windows.
    """
    if any(padding):
        images = pad(images, (padding[1], padding[1], padding[0], padding[0]))
    channels, *kernel = shape[1:]
    result = slopes[0].shape[2:]
    # Copy in the longer runs: along the channels of a row of the kernel, or along a row of the output.
    last = channels * kernel[1] > result[1]
    order = (images.permute(0, 2, 3, 1) if last else images).contiguous()
    one, channel, down, right = (order.permute(0, 3, 1, 2) if last else order).stride()
    seen = (down * dilation[0], right * dilation[1])
    moved = (down * stride[0], right * stride[1])
    size = channels * math.prod(kernel)
    chunk = max(1, CACHE // (size * math.prod(result) * images.element_size()))
    made = [each.new_empty(len(images), each.shape[1], size) for each in slopes]
    parts = zip(*(each.flatten(2).split(chunk) for each in slopes), strict=True)
    outs = zip(*(each.split(chunk) for each in made), strict=True)
    for part, own, out in zip(order.split(chunk), parts, outs, strict=True):
        if last:
            windows = part.as_strided((len(part), *result, *kernel, channels), (one, *moved, *seen, channel))
            windows = windows.reshape(len(part), -1, size)
        else:
            windows = part.as_strided((len(part), channels, *kernel, *result), (one, channel, *seen, *moved))
            windows = windows.reshape(len(part), size, -1).mT
        for left, into in zip(own, out, strict=True):
            torch.bmm(left, windows, out=into)
    if last:
        return [each.view(shape[0], *kernel, channels).permute(0, 3, 1, 2) for each in made]
    return [each.view(tuple(shape)) for each in made]
