"""The tensor operations of a pure function, captured once for each shape of its inputs and then repeated without it.

A training step of a small model spends more time in Python and in ``torch.func``'s bookkeeping than in arithmetic, and
the same step is taken thousands of times. A trace is used only if its first result equals the function's own to the
last bit; one with another layout of images (``leaveout.task.trace.layout``) has to equal it up to rounding.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from leaveout._util.trees import memory
from leaveout.task.batches import leaves, map_leaves
from leaveout.task.trace import layout
from leaveout.task.trace.simplify import call_directly, kind, simplify
from leaveout.task.trace.stages import stages

LOG = logging.getLogger("leaveout")

WARM_UP = 6
"""Calls with the same shapes before a trace is worth its time."""

RARE = 32
"""The same for a function that a trace makes only a little faster."""

PAYS = 64
"""Calls with the same shapes that save about as much time as their trace takes, whatever the size of the network."""

MOST = 64
"""The most traces that one tracer holds."""

ROUNDING = 1000
"""By how many units of the largest value's last place a layout may change a result."""

FEW = 1e-2
"""The relative difference that a result may have because a few of many values fall on the other side of a kink."""


class Tracer:
    """Calls functions of nested tensors, by their trace if there is one.

    Args:
        images: whether images get another layout in memory. Traces are then made at the first call: they round
            differently, and a result must not depend on how often the function was called before.
        never: trace nothing, for functions that are called once.
    """

    def __init__(self, images: bool = False, never: bool = False) -> None:
        self.images, self._never = images, never
        self._calls: Counter[tuple] = Counter()
        self._recent: Counter[Any] = Counter()
        self._expected: int | None = None
        self._traces: dict[tuple, Callable | None] = {}

    def fresh(self) -> Tracer:
        """Return a tracer with the same options, which has traced nothing yet."""
        return Tracer(self.images, self._never)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the traces when pickling: other processes make their own."""
        return self.fresh().__dict__

    def expect(self, calls: int) -> None:
        """Say how often each function will be called, with any shapes: traces are then made only if they pay off."""
        self._expected = max(self._expected or 0, calls)
        self._recent.clear()

    def find(
        self, name: str, function: Callable, args: tuple, *, exact: bool = False, warm_up: int = WARM_UP
    ) -> Callable | None:
        """Return a function's trace for arguments like these, made after ``warm_up`` calls if that pays off; or None.

        ``name`` identifies the function: two functions of the same name must compute the same from the same arguments.
        ``exact`` keeps every bit; otherwise sums may be taken in another order.
        """
        if self._never:
            return None
        key = (name, _signature(args))
        self._recent[name] += 1
        if key not in self._traces:
            self._calls[key] += 1
            self._recent[key] += 1
            anew = self.images and not exact
            if not (anew or (self._calls[key] > warm_up and self._pays(key))) or len(self._traces) >= MOST:
                return None
            self._traces[key] = _traced(name, function, args, anew)
        return self._traces[key]

    def _pays(self, key: tuple) -> bool:
        """Say whether calls with these shapes will be so many that a trace saves more time than it takes.

        Shapes are taken to remain as frequent as they have been in this sweep: a smaller last batch comes once per
        epoch.
        """
        if self._expected is None:
            return True
        share = self._recent[key] / self._recent[key[0]]
        return max(self._calls[key], share * self._expected) > PAYS

    def staged(self, name: str, function: Callable, shared: tuple, others: tuple) -> Callable | None:
        """Return ``others ↦ function(*shared, *others)``, with everything that does not depend on them computed now.

        The trace is made at once, for all calls with these shapes; None if it cannot be made. Several threads may call
        the returned function.
        """
        key = (name, "staged", _signature((shared, others)))
        if key not in self._traces:
            full = self._never or len(self._traces) >= MOST
            self._traces[key] = None if full else _staged(name, function, shared, others, self.images)
        begin = self._traces[key]
        return None if begin is None else begin(*shared)

    def trace(self, counted: tuple[int, int], name: str, function: Callable, *args: Any) -> Callable | None:
        """Return the function's trace for these shapes; None before it pays off, or if it cannot be made.

        ``counted`` has the number of calls that are about to be made, and the number of calls after which a trace pays.
        The trace keeps every bit, except on images: for these it is made at once, and their layout depends on the
        shapes alone, so that all models whose results are compared round alike. Several threads may call the trace, but
        not the function, which may have state.
        """
        key, (calls, pays) = (name, _signature(args)), counted
        if key not in self._traces:
            self._calls[key] += calls
            if self._never or self._calls[key] <= pays * (not self.images) or len(self._traces) >= MOST:
                return None
            self._traces[key] = _traced(name, function, args, self.images, whole=True)
        return self._traces[key]


def _signature(nest: Any) -> Any:
    """Return the nest with each tensor replaced by its kind."""
    if isinstance(nest, Tensor):
        return kind(nest)
    if isinstance(nest, dict):
        return (dict, *nest, *map(_signature, nest.values()))
    if isinstance(nest, tuple | list):
        return (type(nest), *map(_signature, nest))
    return type(nest), nest


def _traced(name: str, function: Callable, args: tuple, anew: bool, whole: bool = False) -> Callable | None:
    """Return the function's trace as a function of the same arguments; None if it cannot be made."""
    inputs = _inputs(args)
    trial, expected = _captured(name, function, args, inputs, anew, whole)
    if trial is None:
        return None
    nest = map_leaves(lambda _: 0, expected)
    _separate(trial.module, inputs, trial.values)
    repeat = call_directly(trial.module)

    @torch.no_grad()
    def call(*now: Any) -> Any:
        return _nested(nest, repeat(*leaves(now)))

    return call


def _staged(name: str, function: Callable, shared: tuple, others: tuple, anew: bool) -> Callable | None:
    """Return the function's trace in two stages, as for ``Tracer.staged``; None if there is no trace."""
    fixed, varying = _inputs(shared), _inputs(others)
    trial, expected = _captured(name, function, (*shared, *others), [*fixed, *varying], anew)
    if trial is None:
        return None
    nest = map_leaves(lambda _: 0, expected)
    first, second = stages(trial.module, len(fixed))
    inputs = [*_run(first, fixed), *varying]
    each = _equal_to(trial.values, inputs, second)
    if each is None:
        return None
    _separate(each.module, inputs, each.values)
    prepare, repeat = call_directly(first), call_directly(each.module)

    @torch.no_grad()
    def begin(*now: Any) -> Callable:
        held = prepare(*leaves(now))

        @torch.no_grad()
        def call(*rest: Any) -> Any:
            return _nested(nest, repeat(*held, *leaves(rest)))

        return call

    return begin


def _inputs(args: tuple) -> list[Any]:
    """Return all tensors and numbers; the same tensor given twice becomes two, since it is two inputs of the trace."""
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves(args)]


def _nested(nest: Any, results: Iterable[Tensor]) -> Any:
    given = iter(results)
    return map_leaves(lambda _: next(given), nest)


def _captured(
    name: str, function: Callable, args: tuple, inputs: list[Any], anew: bool, whole: bool = False
) -> tuple[_Trial | None, Any]:
    """Return the function's trace, simplified and, if ``anew``, with images laid out anew; and the function's value.

    The trace is None if it cannot be made.
    """
    expected = function(*args)

    def flat(*tensors: Tensor) -> list[Tensor]:
        with _RealZeros():
            return leaves(function(*_nested(args, tensors)))

    try:
        # make_fx keeps the shape of every value as a fake tensor. Without a common mode for them it would make one for
        # each, which takes as long as everything else.
        with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
            module = make_fx(functionalize(flat))(*inputs)
    except Exception as error:  # noqa: BLE001 - many things can prevent a trace; the function itself still works
        LOG.info("%s is not traced, and slower for it: %s: %s", name, type(error).__name__, error)
        return None, expected
    simplify(module)
    layout.pool_by_channels(module)
    trusted = _equal_to(leaves(expected), inputs, module)
    if trusted is None:
        LOG.info("%s is not traced, and slower for it: its trace gives other values", name)
        return None, expected
    return (_laid_out(trusted, inputs, whole) if anew else None) or trusted, expected


class _Trial(NamedTuple):
    """A trace that was run once, with its results."""

    module: fx.GraphModule
    values: list[Tensor]


@torch.no_grad()
def _run(module: fx.GraphModule, inputs: list[Any]) -> list[Tensor]:
    return module(*inputs)


def _equal_to(expected: list[Tensor], inputs: list[Any], module: fx.GraphModule) -> _Trial | None:
    """Return the module with its results, if they equal the function's own to the last bit."""
    values = _run(module, inputs)
    same = all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    return _Trial(module, values) if same else None


def _laid_out(trusted: _Trial, inputs: list[Any], whole: bool) -> _Trial | None:
    """Return the trace with images laid out anew, if its results are the same.

    They are compared for the inputs and, because these may be zero, for random ones. A ``whole`` trace may fall on the
    other side of a kink here and there; it is compared for the random inputs only, by the norm of the difference.
    """
    generator = torch.Generator().manual_seed(0)
    random = [
        torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
        else leaf
        for leaf in inputs
    ]
    try:
        other = layout.for_images(trusted.module, whole)
        if other is None:
            return None
        simplify(other)
        trial = _Trial(other, _run(other, inputs))
        pairs = [*zip(_run(other, random), _run(trusted.module, random), strict=True)]
    except Exception:  # noqa: BLE001 - an operation that depends on the layout
        return None
    if whole:
        return trial if all(_close_in_the_mean(a, b) for a, b in pairs) else None
    pairs += zip(trial.values, trusted.values, strict=True)
    return trial if all(_close(a, b) for a, b in pairs) else None


@torch.no_grad()
def _separate(module: fx.GraphModule, inputs: list[Any], values: list[Tensor]) -> None:
    """Give every result its own memory, because callers write into it and one tensor may be returned twice."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    results: Any = output.args[0]
    constants = [getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"]
    used = {memory(leaf) for leaf in [*inputs, *constants] if isinstance(leaf, Tensor)}
    own = []
    for node, value in zip(results, values, strict=True):
        if memory(value) in used:
            with module.graph.inserting_before(output):
                node = module.graph.call_function(torch.ops.aten.clone.default, (node,))
        used.add(memory(value))
        own.append(node)
    output.args = (own,)


def _close(a: Tensor, b: Tensor) -> bool:
    """Say whether two results differ by no more than another order of summation may cause."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool((a - b).abs().max() <= ROUNDING * torch.finfo(a.dtype).eps * b.abs().max())


def _close_in_the_mean(a: Tensor, b: Tensor) -> bool:
    """Say whether two results differ by no more than a few values on the other side of a kink may cause."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool((a - b).norm() <= FEW * b.norm())


class _RealZeros(TorchDispatchMode):
    """Replaces the zeros that forward mode uses for missing tangents by ordinary ones.

    They are tensors without memory: a traced operation that reads them would crash.
    """

    def __torch_dispatch__(self, function: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return function(*map_leaves(_real, args), **(kwargs or {}))


def _real(leaf: Any) -> Any:
    if not (isinstance(leaf, Tensor) and leaf._is_zerotensor()):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
