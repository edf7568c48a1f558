"""Finds, by name, what hides a dependence from a gradient: stop-gradients, and functions with a gradient of their own.

What they hide may be zero on the examples that are looked at and not on others: a norm that is clamped, a mask. So
they count as soon as they are on the way to the loss, whatever their effect there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leaveout._util.trees import Params, distance, norm
from leaveout.task.batches import leaves, map_leaves
from leaveout.task.guard.differences import difference, inner, like
from leaveout.task.objective import Objective
from leaveout.task.rewrites.missing_rules import is_hidden, padding_of, stops
from leaveout.task.rewrites.own_functions import calls

SHIFTS = (0.1, 1.0, 10.0)
"""How far stopped values are moved, relative to their size, to see whether the gradient depends on them anywhere."""

SLIGHT, COUNTS = 1e-6, 1e-9
"""A further shift, and the least relative change of the gradient that counts as one: a hundred times rounding."""

PADDING = "padding_idx of an embedding that is used elsewhere too"

COTANGENTS = (1e-3, 1.0, 1e3)
"""Sizes of the gradients that a function of its own is given: some clip them."""


class Hidden(NamedTuple):
    """What hides a dependence from the gradient on the way to the loss.

    Attributes:
        stops: the modules that stop gradients, in words; empty if none does.
        elsewhere: whether the gradient depends on the stopped values only where these are far from what they are here.
        own: the functions whose gradient is not their derivative, in words; empty if there are none.
    """

    stops: str = ""
    elsewhere: bool = False
    own: str = ""


def hidden(objective: Objective, at: Params, batch: Any) -> Hidden:
    """Return what hides a dependence from the gradient of a batch of examples."""
    own = _own_gradients(objective, at, batch)
    with _Stopped(objective.model) as noted:
        _, live = noted.gradient(objective, at, batch)
    if not live:
        return Hidden(own=own)
    return Hidden(live, not matters(objective, at, batch) and matters(objective, at, batch, SHIFTS), own)


def matters(objective: Objective, at: Params, batch: Any, shifts: Sequence[float] = (0.0,)) -> bool:
    """Say whether the gradient depends on the stopped values, after moving them by one of these shifts."""
    for shift in shifts:
        pair = []
        for further in (0.0, SLIGHT):
            with _Stopped(objective.model, shift + further * max(shift, 1.0)) as moved:
                pair.append(moved.gradient(objective, at, batch)[0])
        if not distance(*pair) <= COUNTS * norm(pair[0]):
            return True
    return False


class _Stopped(TorchFunctionMode):
    """Notes the values behind stop-gradients that depend on the parameters, and moves them by a random shift.

    They are given a history of their own, which tells whether they are on the way to the loss.
    """

    def __init__(self, model: nn.Module, shift: float = 0.0) -> None:
        super().__init__()
        self._names = {id(module): f"'{name or 'model'}'" for name, module in model.named_modules()}
        self._shift, self._generator = shift, torch.Generator().manual_seed(0)
        self._found: list[tuple[str, Tensor]] = []
        self._padded: dict[int, str] = {}
        self._used: set[int] = set()
        self._inside: dict[int, Tensor] = {}  # made of stopped values, where gradients are off
        self._off = False

    def gradient(self, objective: Objective, at: Params, batch: Any) -> tuple[Params, str]:
        """Compute the gradient of the mean loss; and name the stops on the way to it, none if there are none."""
        tracked = {name: tensor.detach().requires_grad_() for name, tensor in at.items()}
        self._used.clear()
        with torch.enable_grad():
            loss = objective.losses(tracked, batch).mean()
        found = [tensor for _, tensor in self._found]
        slopes = torch.autograd.grad(loss, [*tracked.values(), *found], allow_unused=True, materialize_grads=False)
        pairs = zip(tracked.items(), slopes, strict=False)
        gradient = {name: torch.zeros_like(t) if g is None else g for (name, t), g in pairs}
        live = [name for (name, _), g in zip(self._found, slopes[len(at) :], strict=True) if g is not None]
        live += [name for weight, name in self._padded.items() if weight in self._used]
        return gradient, live[0] if live else ""

    def __torch_function__(
        self, function: Callable, _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if stops(function):
            kind = ".data" if function.__name__ == "__get__" else "detach"
            return self._noted(kind, args[0]) if args[0].requires_grad else function(*args, **kwargs)
        if function in (Tensor.numpy, Tensor.__array__):
            return function(args[0].detach(), *args[1:], **kwargs)
        if function is F.embedding and padding_of(*args, **kwargs) is not None:
            self._padded.setdefault(id(args[1]), self._place(PADDING))
            return function(*args, **kwargs)
        if function is torch._C._set_grad_enabled:  # by the model; inside a function of its own nobody calls this
            self._off = not args[0]
        if not (self._off and is_hidden(function)):
            result = function(*args, **kwargs)
            if isinstance(result, Tensor) and result.requires_grad:
                self._used.update(id(arg) for arg in args if isinstance(arg, Tensor))
            return result
        with torch.enable_grad():
            if not function.__name__.endswith("_"):  # one that writes to its argument needs the argument itself
                args, kwargs = map_leaves(self._cut, (args, kwargs))
            result = function(*args, **kwargs)
        self._inside |= {id(leaf): leaf for leaf in leaves(result) if isinstance(leaf, Tensor)}
        return result

    def _cut(self, value: Any) -> Any:
        return value if id(value) in self._inside else self._noted("no_grad", value)

    def _noted(self, kind: str, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad):
            return value
        leaf = value.detach()
        if self._shift:
            leaf = leaf + like({"": leaf}, self._generator, self._shift)[""]
        leaf.requires_grad_()
        self._found.append((self._place(kind), leaf))
        return leaf * 1  # may be written to

    def _place(self, kind: str) -> str:
        """Say which module is being called, and how it stops gradients."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in self._names:
                return f"{self._names[id(module)]} ({type(module).__name__}) stops gradients ({kind})"
            frame = frame.f_back
        return f"the loss stops gradients ({kind})"


def _own_gradients(objective: Objective, at: Params, batch: Any) -> str:
    """Name the own functions of a model whose gradient is not their derivative, whatever gradient they are given."""
    with calls() as made:
        ones = next(iter(at.values())).new_ones(len(leaves(batch)[0]))
        objective.gradient(at, ones, batch, alone=True)
    wrong = sorted({function.__name__ for function, args in made if not _is_derivative(function, args)})
    return f"the model has functions with a gradient of their own ({', '.join(wrong)})" if wrong else ""


def _is_derivative(function: type[torch.autograd.Function], args: Sequence[Any]) -> bool:
    """Say whether a function's gradient is its derivative at some arguments, as far as that can be seen there."""
    at = {str(i): arg.detach() for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.is_floating_point()}

    def value(point: Params) -> Params:
        given = [point[str(i)] * 1 if str(i) in point else arg for i, arg in enumerate(args)]
        results = function.apply(*given)
        return dict(_numbered(results if isinstance(results, tuple) else (results,)))

    try:
        measured = difference(lambda point: {n: t.detach() for n, t in value(point).items()}, at) if at else None
        if measured is None:
            return True
        tracked = {name: tensor.requires_grad_() for name, tensor in at.items()}
        with torch.enable_grad():
            results = {name: one for name, one in value(tracked).items() if one.requires_grad}
            given = like({name: one.detach() for name, one in results.items()}, torch.Generator().manual_seed(1))
            for size in COTANGENTS:
                sent = {name: size * one for name, one in given.items()}
                back = torch.autograd.grad(
                    list(results.values()), list(tracked.values()), list(sent.values()), retain_graph=True,
                    allow_unused=True, materialize_grads=True,
                )  # fmt: skip
                pulled = dict(zip(tracked, back, strict=True))
                for direction, change in zip(measured.directions, measured.changes, strict=True):
                    wanted, found = inner(sent, change), inner(pulled, direction)
                    scale = norm(sent) * norm(change) + norm(pulled) * norm(direction)
                    if abs(wanted - found) > 10 * measured.tolerance * scale:
                        return False
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):  # it cannot be called alone
        return True
    return True


def _numbered(results: tuple) -> Iterator[tuple[str, Tensor]]:
    for i, result in enumerate(results):
        if isinstance(result, Tensor) and result.is_floating_point():
            yield str(i), result
