"""A state at which derivatives are compared, with plain autograd's results there, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leaveout._util.trees import Params, distance, each, norm
from leaveout.errors import LeaveoutError
from leaveout.task import batches
from leaveout.task.guard.differences import Difference, difference, finite, like, padding_rows
from leaveout.task.objective import Objective

MOVED = 0.1
"""The distance of the nearby point from a state, relative to the parameters."""

AGAIN = 8
"""How often a loss is recomputed to see whether it differs each time."""


class Point(NamedTuple):
    """Plain autograd's results at one state: differences of the gradient, and per-example gradients."""

    difference: Difference
    examples: Params

    @property
    def at(self) -> Params:
        """The state."""
        return self.difference.at

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(next(iter(self.examples.values())))

    def has_gradient(self, gradient: Params) -> bool:
        """Say whether this is the batch's gradient."""
        return self._near(gradient, self.difference.gradient)

    def has_examples(self, gradients: Params) -> bool:
        """Say whether these are the examples' gradients."""
        return self._near(gradients, self.examples)

    def has_reads(self, computed: Tensor, which: int = 0) -> bool:
        """Say whether these are a direction's inner products with the examples' gradients, divided by their number."""
        expected = reads(self.examples, self.difference.directions[which])
        scale = norm(self.difference.directions[which]) * norm(self.examples) / self.size
        return bool(
            (computed - expected).norm() <= self.difference.tolerance * max(float(expected.norm()), 1e-3 * scale)
        )

    def _near(self, computed: Params, wanted: Params) -> bool:
        scale = max(norm(wanted), 1e-3 * norm(self.examples))
        return distance(computed, wanted) <= self.difference.tolerance * scale


class Trial(NamedTuple):
    """An objective and a batch in float64, if possible, and a point; or a problem found there."""

    objective: Objective
    batch: Any
    at: Params
    point: Point | None = None
    problem: str | None = None


def trial(objective: Objective, params: Params, batch: Any, near: bool) -> Trial:
    """Return a point near a state, where gates that are zero at the state are open, or else the state itself.

    What is correct at a point without symmetries is correct elsewhere, and the moved point has the fewest; without
    ``near`` the state itself comes first. At both, examples are checked for dependence on each other.
    """
    wide, at, given = widened(objective, params, batch)
    moved = each(torch.add, at, like(at, torch.Generator().manual_seed(0), MOVED))
    point: Point | None = None
    for seed, place in enumerate((moved, at) if near else (at, moved)):
        if point is None:
            problem, point = _point(wide, place, given, seed)
        else:
            problem = _mixing(wide, place, given)
        if problem:
            return Trial(wide, given, at, None, problem)
    return Trial(wide, given, at if point is None else point.at, point)


def mixing(objective: Objective, params: Params, batch: Any) -> str | None:
    """Say whether examples depend on each other at a state, using forward passes only."""
    wide, at, given = widened(objective, params, batch)
    return _mixing(wide, at, given)


def widened(objective: Objective, params: Params, batch: Any) -> tuple[Objective, Params, Any]:
    """Return the objective, a state and a batch in float64, if the model can be computed in it."""
    try:
        wide, given = objective.to_float64(), batches.to_float64(batch)
        with torch.no_grad():
            wide.losses(batches.to_float64(params), given)
    except LeaveoutError:
        raise
    except Exception:  # noqa: BLE001 - a model that insists on its own dtype is compared in that
        wide, given = objective.untraced(), batch
    return wide, batches.to_float64(params) if wide.is_wide else each(torch.clone, params), given


def plain(objective: Objective, batch: Any) -> Callable[[Params], Params]:
    """Return the function that computes ḡ as ``loss.backward()`` does."""
    return lambda params: _plain(objective, batch, params)[1]


def _plain(objective: Objective, batch: Any, params: Params) -> tuple[Tensor, Params]:
    """Compute the losses, and ḡ."""
    tracked = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    with torch.enable_grad():
        losses = objective.losses(tracked, batch)
        gradients = torch.autograd.grad(losses.mean(), list(tracked.values()), allow_unused=True)
    pairs = zip(tracked.items(), gradients, strict=True)
    return losses.detach(), {n: torch.zeros_like(t) if g is None else g for (n, t), g in pairs}


def reads(examples: Params, direction: Params) -> Tensor:
    """Compute ⟨u, g(z)⟩/|Z| for each example."""
    size = len(next(iter(examples.values())))
    products = [(examples[name] * direction[name]).reshape(size, -1).sum(1) for name in direction]
    return torch.stack(products).sum(0) / size


def _mixing(objective: Objective, at: Params, batch: Any) -> str | None:
    """Say whether an example's loss alone differs from its loss in the batch."""
    with torch.no_grad():
        alone, together = torch.cat([objective.losses(at, one) for one in _singles(batch)]), objective.losses(at, batch)
    return _apart(objective, at, batch, alone, together)


def _apart(objective: Objective, at: Params, batch: Any, alone: Tensor, together: Tensor) -> str | None:
    """Say how losses of single examples differ from those in the batch, and whether the other examples cause it."""
    near = partial(torch.allclose, rtol=_rounding(objective), atol=1e-2 * _rounding(objective), equal_nan=True)
    if near(alone, together):
        return None
    with torch.no_grad():
        if not all(near(objective.losses(at, batch), together) for _ in range(AGAIN)):
            return (
                "the same examples have another loss each time; draws by numpy or Python's random are not recorded, so "
                "use PyTorch's random generators"
            )
    worst = int((alone - together).abs().nan_to_num().argmax())
    return _depends(f"{alone[worst]:.6g} alone, {together[worst]:.6g} with others")


def _point(objective: Objective, at: Params, batch: Any, seed: int) -> tuple[str | None, Point | None]:
    """Return plain autograd's results at a state, or that examples depend on each other; None if not finite."""
    together, whole = _plain(objective, batch, at)
    alone, parts = zip(*(_plain(objective, one, at) for one in _singles(batch)), strict=True)
    if problem := _apart(objective, at, batch, torch.cat(alone), together):
        return problem, None
    examples = {name: torch.stack([part[name] for part in parts]) for name in at}
    if not (finite(whole) and finite(examples)):
        return None, None
    apart = distance(whole, each(lambda e: e.mean(0), examples))
    if apart > _rounding(objective) * (1e2 * norm(whole) + norm(examples)):
        return _depends("the mean of their gradients is not the batch's"), None
    measured = difference(plain(objective, batch), at, seed, padding_rows(objective.model), here=whole)
    return None, Point(measured, examples) if measured else None


def _singles(batch: Any) -> list[Any]:
    size = len(batches.leaves(batch)[0])
    return [batches.map_leaves(partial(_slice, i=i), batch) for i in range(size)]


def _slice(leaf: Tensor, i: int) -> Tensor:
    return leaf[i : i + 1]


def _rounding(objective: Objective) -> float:
    return 1e-7 if objective.is_wide else 1e-3


def _depends(how: str) -> str:
    return (
        f"the loss of an example depends on the other examples in its batch ({how}); normalise and compare within "
        "single examples only, and check that outputs and targets have the same shape"
    )
