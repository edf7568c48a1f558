"""Finds which module makes the derivative of the gradient wrong, and why: for helpful error messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from leaveout._util.trees import Params, each
from leaveout.task import batches
from leaveout.task.guard.differences import Difference, difference, padding_rows
from leaveout.task.objective import Objective
from leaveout.task.rewrites.missing_rules import WrittenOut, is_hidden, padding_of, stops


def culprit(objective: Objective, params: Params, batch: Any) -> str:
    """Name the innermost module whose second derivative is wrong or missing, or else the loss, with the reason."""
    calls, outputs, targets = _forward(objective, params, batch)
    wrong: dict[str, str] = {}
    for name, module in objective.model.named_modules():
        if name in calls:
            prefix = f"{name}." if name else ""
            own = {n.removeprefix(prefix): t for n, t in params.items() if n.startswith(prefix)}
            padding = {f"own.{weight}": row for weight, row in padding_rows(module).items()}
            with objective.called.modes(frozenset()), sdpa_kernel(SDPBackend.MATH):
                problem = _problem(partial(_module_value, module, own, *calls[name]), padding)
            if problem:
                wrong[name] = f"'{name or 'model'}' ({type(module).__name__}) {problem}"
    inner = [name for name in wrong if not any(other != name and _within(other, name) for other in wrong)]
    if inner:
        return wrong[inner[0]]
    problem = _problem(partial(_loss_value, objective, outputs, targets))
    if problem or isinstance(outputs, Tensor):
        return f"the loss {problem}" if problem else "PyTorch's second derivative of the model with its loss is wrong"
    return "the model has several outputs, and Gauss-Newton products are those of a single one"


def _forward(objective: Objective, params: Params, batch: Any) -> tuple[dict[str, tuple[tuple, dict]], Tensor, Any]:
    """Return the arguments with which each module is first called, by name; and the outputs and targets."""
    calls: dict[str, tuple[tuple, dict]] = {}

    def note(name: str) -> Callable:
        def hook(_module: nn.Module, args: tuple, kwargs: dict, _out: Any) -> None:
            calls.setdefault(name, (args, kwargs))

        return hook

    handles = [m.register_forward_hook(note(n), with_kwargs=True) for n, m in objective.model.named_modules()]
    try:
        with torch.no_grad():
            outputs, targets = objective.outputs(params, batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls, outputs, targets


def _within(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _module_value(module: nn.Module, own: Params, args: tuple, kwargs: dict) -> tuple[Params, Callable]:
    """Return a point and a scalar made of a module's outputs, as a function of its parameters and inputs."""
    inputs = [leaf for leaf in batches.leaves([args, kwargs]) if _is_real(leaf)]
    at = {**{f"own.{n}": t for n, t in own.items()}, **{f"in.{i}": t.detach() for i, t in enumerate(inputs)}}

    def value(point: Params) -> Tensor:
        moving = iter(point[f"in.{i}"] for i in range(len(inputs)))
        called = batches.map_leaves(lambda leaf: next(moving) if _is_real(leaf) else leaf, [args, kwargs])
        made = functional_call(module, {n: point[f"own.{n}"] for n in own}, tuple(called[0]), called[1])
        results = [leaf for leaf in batches.leaves(made) if _is_real(leaf)]
        generator = torch.Generator().manual_seed(0)
        mixed = [torch.randn(r.shape[-1:], generator=generator, dtype=r.dtype).to(r.device) * r for r in results]
        return sum((one.sum() + one.square().sum() for one in mixed), torch.zeros((), dtype=torch.float64))

    return at, value


def _loss_value(objective: Objective, outputs: Any, targets: Any) -> tuple[Params, Callable]:
    """Return a point and the sum of the losses, as a function of the model's outputs."""
    at = {f"out.{i}": leaf.detach() for i, leaf in enumerate(filter(_is_real, batches.leaves(outputs)))}

    def value(point: Params) -> Tensor:
        moving = iter(point[f"out.{i}"] for i in range(len(at)))
        return objective.output_losses(
            batches.map_leaves(lambda leaf: next(moving) if _is_real(leaf) else leaf, outputs), targets
        ).sum()

    return at, value


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _problem(
    given: Callable[[], tuple[Params, Callable[[Params], Tensor]]], padding: dict[str, int] | None = None
) -> str | None:
    """Return what is wrong with the second derivative of a function; None if nothing is."""

    def slope(point: Params) -> Params:
        tracked = {n: t.detach().requires_grad_() for n, t in point.items()}
        with torch.enable_grad():
            gradients = torch.autograd.grad(value(tracked), list(tracked.values()), allow_unused=True)
        return {
            n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(tracked.items(), gradients, strict=True)
        }

    try:
        at, value = given()
        measured = difference(slope, at, padding=padding) if at else None
    except Exception:  # noqa: BLE001 - a module that cannot be called alone cannot be identified as the culprit
        return None
    if measured is None:
        return None
    return _verdict(measured, value)


def _verdict(measured: Difference, value: Callable[[Params], Tensor]) -> str | None:
    """Compare a function's second derivatives with the measured ones, and say why they differ; None if they agree."""
    u = measured.directions[0]
    tried = [
        _product(lambda: jvp(grad(value), (measured.at,), (u,))[1]),
        _product(lambda: vjp(grad(value), measured.at)[1](u)[0]),
    ]
    if measured.symmetric and any(isinstance(one, dict) and measured.agrees(one) for one in tried):
        return None
    message = next((one for one in tried if isinstance(one, str)), "")
    tracked = {n: t.detach().requires_grad_() for n, t in measured.at.items()}
    with _Noting() as noted, torch.enable_grad():
        made = value(tracked)
    if own := _own_gradients(made):
        return f"has a gradient of its own ({', '.join(own)})"
    if noted.stops:
        return f"stops gradients ({', '.join(sorted(noted.stops))})"
    if message:
        return f"has an operation without a second derivative in PyTorch ({message})"
    return "has an operation whose second derivative in PyTorch is not that of its gradient (a gradient of its own?)"


def _own_gradients(value: Tensor) -> list[str]:
    """Return the names of the custom ``autograd.Function``s that computed a value."""
    own = torch.autograd.function.BackwardCFunction
    return sorted({type(node).__name__.removesuffix("Backward") for node in nodes(value) if isinstance(node, own)})


def nodes(values: Any) -> set[Any]:
    """Return everything that took part in computing some tensors, as autograd has noted it."""
    seen: set[Any] = set()
    waiting = [leaf.grad_fn for leaf in batches.leaves(values) if isinstance(leaf, Tensor)]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [source for source, _ in node.next_functions]
    return seen


def _product(function: Callable[[], Params]) -> Params | str:
    """Compute the product, or return PyTorch's error message if there is none."""
    try:
        with WrittenOut():
            return each(Tensor.detach, function())  # of tied weights, which belong to another module too
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0].rstrip(".")


class _Noting(TorchFunctionMode):
    """Notes what stops gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: set[str] = set()

    def __torch_function__(
        self, function: Callable, _types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if stops(function):
            self.stops.add(".data" if function.__name__ == "__get__" else "detach")
        elif function is F.embedding and padding_of(*args, **(kwargs or {})) is not None:
            self.stops.add("padding_idx of an embedding that is used elsewhere too")
        elif is_hidden(function):
            self.stops.add("no_grad")
        return function(*args, **(kwargs or {}))
