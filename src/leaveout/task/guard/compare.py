"""Compares every form of second derivative with differences of the gradient, on the first examples.

PyTorch's formulas are many, and a few are wrong or missing. Which forms are right is found out for each task: at the
state it is made with, near it (where a gate that is zero is open), and at a run's last state. Everything is computed
in float64, on a copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from leaveout._util.trees import Params, each
from leaveout.errors import LeaveoutError
from leaveout.task import batches
from leaveout.task.derivatives import (
    directional,
    example_gradients,
    example_products,
    gradient,
    hessian_products,
    outer_products,
    stacked_gradients,
    weight_products,
    weighted_changes,
)
from leaveout.task.forms import CHANGES, EXAMPLE, VECTOR, VECTORS, Abilities, Form
from leaveout.task.guard.culprit import culprit
from leaveout.task.guard.differences import FLOOR, Difference, difference, finite, inner, like, norm

if TYPE_CHECKING:
    from leaveout.task.task import Task

MOVED = 0.1
"""How far the second point is from the first, relative to the parameters."""


class Point(NamedTuple):
    """Plain autograd's answers at one state: differences of the gradient, and each example's own gradient."""

    known: Difference
    examples: Params

    @property
    def at(self) -> Params:
        """The state."""
        return self.known.at

    def reads(self, which: int) -> Tensor:
        """⟨u, g(z)⟩/|Z| for each example."""
        u = self.known.directions[which]
        size = len(next(iter(self.examples.values())))
        return sum((self.examples[n] * u[n]).reshape(size, -1).sum(1) for n in u) / size  # type: ignore[return-value]

    def agree_reads(self, found: Tensor, which: int) -> bool:
        """Whether these are the directions' inner products with the examples' gradients."""
        known = self.reads(which)
        scale = norm(self.known.directions[which]) * norm(self.examples) / len(known)
        return bool((found - known).norm() <= self.known.tolerance * max(float(known.norm()), 1e-3 * scale))


def trial_points(task: Task, params: Params, batch: Any, near: bool) -> tuple[Task, Any, list[Point], str | None]:
    """The task and its batch in float64 where they can be, a point to compare at, and a problem if one shows.

    The point is near the parameters or, where none can be had there or ``near`` is not set, at them.
    """
    try:
        wide, given = task.widened(), batches.map_leaves(_widened, batch)
        with torch.no_grad():
            wide.losses(each(_widened, params), given)
    except LeaveoutError:
        raise
    except Exception:  # noqa: BLE001 - a model that insists on its own type is compared in that
        wide, given = task.quiet(), batch
    at = each(_widened, params) if wide.is_wide else each(torch.clone, params)
    moved = each(torch.add, at, like(at, torch.Generator().manual_seed(0), MOVED))
    # What is right at a point without symmetries is right at others; the moved one has fewest.
    points: list[Point] = []
    for number, place in enumerate((moved, at) if near else (at, moved)):
        problem, point = _point(wide, place, given, number, whole=not points)
        if problem:
            return wide, given, [], problem
        points += [point] if point else []
    return wide, given, points, None


def _point(task: Task, at: Params, batch: Any, seed: int, whole: bool) -> tuple[str | None, Point | None]:
    """A problem that shows at a state, and what plain autograd gives there, if the ``whole`` of it is asked for."""
    size = len(batches.leaves(batch)[0])
    singles = [batches.map_leaves(lambda leaf, i=i: leaf[i : i + 1], batch) for i in range(size)]
    with torch.no_grad():
        alone = torch.cat([task.losses(at, one) for one in singles])
        together = task.losses(at, batch)
    if not bool(torch.isfinite(together).all() and torch.isfinite(alone).all()):
        return None, None
    rounding = 1e-7 if task.is_wide else 1e-3
    if not torch.allclose(alone, together, rtol=rounding, atol=rounding * 1e-2):
        worst = int((alone - together).abs().argmax())
        return _mixed(f"{alone[worst]:.6g} alone, {together[worst]:.6g} with others"), None
    if not whole:
        return None, None
    each_one = [_plain(task, one)(at) for one in singles]
    examples = {name: torch.stack([one[name] for one in each_one]) for name in at}
    mean = each(lambda t: t.mean(0), examples)
    known = difference(_plain(task, batch), at, seed)
    slope = known.gradient if known else _plain(task, batch)(at)
    if finite(slope) and norm(each(torch.sub, slope, mean)) > 1e2 * rounding * norm(slope) + rounding * norm(examples):
        return _mixed("their mean gradient is not the batch's"), None
    return None, Point(known, examples) if known and finite(examples) else None


def _mixed(how: str) -> str:
    return (
        f"the loss of an example depends on the other examples in its batch ({how}); normalise and compare within "
        "single examples only, and check that outputs and targets have the same shape"
    )


def _plain(task: Task, batch: Any) -> Callable[[Params], Params]:
    """ḡ as ``loss.backward()`` gives it."""

    def slope(params: Params) -> Params:
        tracked = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
        with torch.enable_grad():
            loss = task.losses(tracked, batch).mean()
            found = torch.autograd.grad(loss, list(tracked.values()), allow_unused=True)
        return {
            name: torch.zeros_like(tracked[name]) if one is None else one
            for name, one in zip(tracked, found, strict=True)
        }

    return slope


def compared(task: Task, params: Params, batch: Any, before: Abilities | None = None) -> tuple[str | None, Abilities]:
    """A problem that no method can handle, or what can be done with the task at this state and near it.

    With ``before``, no form is taken that was wrong then.
    """
    wide, given, points, problem = trial_points(task, params, batch, near=before is None)
    if problem:
        return problem, Abilities()
    if problem := _untransformed(task, params, batch):
        return problem, Abilities()
    own = task.quiet() if wide.is_wide and not task.is_wide else None
    found = _Search(wide, given, points, own, params, batch).abilities(before)
    whole = found.vector and found.vectors and found.changes and found.example and found.outer and found.slope
    if not whole or not found.symmetric:
        at = points[0].at if points else (each(_widened, params) if wide.is_wide else params)
        found = found._replace(reason=culprit(wide, at, given))
    return None, found


def _untransformed(task: Task, params: Params, batch: Any) -> str | None:
    """The problem of a model that ``torch.func`` cannot differentiate even once."""
    quiet = task.quiet()
    quiet.abilities = Abilities()
    try:
        gradient(quiet, params, batch)
        example_gradients(quiet, params, batch)
    except Exception as error:  # noqa: BLE001 - PyTorch and the model may raise anything; it is passed on in words
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return (
            f"torch.func cannot take its gradient ({reason}); write the operation with PyTorch's own functions, or give "
            "an autograd.Function a setup_context and generate_vmap_rule = True"
        )
    return None


def tried(task: Task, params: Params, batch: Any) -> tuple[str | None, Abilities]:
    """What can be done with the task, tried but not compared; the form that is wrong most often is left out."""
    if problem := _untransformed(task, params, batch):
        return problem, Abilities()
    quiet = task.quiet()
    return None, _Search(quiet, batch, [], None, params, batch).abilities(None)


class _Search:
    """The forms in their order of preference, each tried and compared."""

    def __init__(
        self, task: Task, batch: Any, points: list[Point], own: Task | None, params: Params, narrow: Any
    ) -> None:
        self.task, self.batch, self.points = task, batch, points
        self.own, self.params, self.narrow = own, params, narrow

    def abilities(self, before: Abilities | None) -> Abilities:
        """What works, and is right."""
        self._set(Abilities(vmap=True, stacks=True, forward=True, outer=True))
        for ability in ("vmap", "stacks"):
            check = self._gradients if ability == "vmap" else self._models
            if not self._right(check) or (before is not None and not getattr(before, ability)):
                self._set(self.task.abilities._replace(**{ability: False}))
        symmetric = all(point.known.symmetric for point in self.points)
        symmetric &= before is None or before.symmetric
        self._set(self.task.abilities._replace(symmetric=symmetric))
        self._set(self.task.abilities._replace(reads=self._right(self._reads)))
        for kind, order, check in (
            ("vector", VECTOR if self.points else VECTOR[1:], self._vector),
            ("vectors", VECTORS, self._vectors),
            ("changes", CHANGES, self._changes),
            ("example", EXAMPLE if symmetric else (), self._example),
        ):
            self._choose(kind, _from(order, before and getattr(before, kind)) if before else order, check)
        if not self._right(self._outer):
            self._set(self.task.abilities._replace(forward=False))
            if not self._right(self._outer):
                self._set(self.task.abilities._replace(outer=False))
        for stops in (False, True):
            self._set(self.task.abilities._replace(stops=stops, slope=True))
            if self._right(self._slope):
                break
        else:
            self._set(self.task.abilities._replace(slope=False))
        return self.task.abilities

    def _set(self, abilities: Abilities) -> None:
        self.task.abilities = abilities
        if self.own is not None:
            self.own.abilities = abilities

    def _choose(self, kind: str, order: Sequence[Form], check: Callable) -> None:
        for form in order:
            self._set(self.task.abilities._replace(**{kind: form}))
            if self._right(check):
                return
        self._set(self.task.abilities._replace(**{kind: None}))

    def _right(self, check: Callable[[Task, Params, Any], Iterator[Callable[[Point], bool]]]) -> bool:
        """Whether it runs, in float64 and in the task's own type, and agrees at every point."""
        try:
            for point in self.points:
                if not all(agrees(point) for agrees in check(self.task, point.at, self.batch)):
                    return False
            if self.own is not None or not self.points:
                for _ in check(self.own or self.task, self.params, self.narrow):
                    pass
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            return False
        return True

    def _directions(self, at: Params) -> tuple[Params, Params]:
        for point in self.points:
            if point.at is at:
                return point.known.directions
        return each(torch.ones_like, at), each(torch.ones_like, at)

    def _gradients(self, task: Task, at: Params, batch: Any) -> Iterator[Callable[[Point], bool]]:
        found = example_gradients(task, at, batch)
        whole = gradient(task, at, batch)
        yield lambda point: _near(found, point.examples, point)
        yield lambda point: _near(whole, point.known.gradient, point)

    def _models(self, task: Task, at: Params, batch: Any) -> Iterator[Callable[[Point], bool]]:
        size = len(batches.leaves(batch)[0])
        like_one = next(iter(at.values()))
        stack = each(lambda t: torch.stack([t, t]), at)
        weights = like_one.new_ones((2, size))
        weights[1, 0] = 0
        found = stacked_gradients(task, stack, weights, batch)
        task.over_models(task.query_losses, (0, None))(stack, batch)

        def agrees(point: Point) -> bool:
            left_out = each(lambda g, e: g - e[0] / size, point.known.gradient, point.examples)
            return _near({n: torch.stack([point.known.gradient[n], left_out[n]]) for n in at}, found, point)

        yield agrees

    def _reads(self, task: Task, at: Params, batch: Any) -> Iterator[Callable[[Point], bool]]:
        value, reads = weight_products(task, at, batch, _stack(self._directions(at)))
        yield lambda point: all(point.agree_reads(reads[i], i) for i in (0, 1))
        yield lambda point: _near(value, point.known.gradient, point)

    def _vector(self, task: Task, at: Params, batch: Any) -> Iterator[Callable[[Point], bool]]:
        value, curved, reads = directional(task, at, batch, self._directions(at)[0])
        yield lambda point: self._transposed(point, curved, 0) and point.agree_reads(reads, 0)
        yield lambda point: value is None or _near(value, point.known.gradient, point)

    def _vectors(self, task: Task, at: Params, batch: Any) -> Iterator[Callable[[Point], bool]]:
        value, curved, reads = hessian_products(task, at, batch, _stack(self._directions(at)))
        for i in (0, 1):
            yield lambda point, i=i: self._transposed(point, _row(curved, i), i) and point.agree_reads(reads[i], i)
        yield lambda point: _near(value, point.known.gradient, point)

    def _transposed(self, point: Point, product: Params, which: int) -> bool:
        if not self.task.abilities.symmetric:
            return point.known.agrees_transposed(product, which)
        return point.known.agrees(product, which)

    def _changes(self, task: Task, at: Params, batch: Any) -> Iterator[Callable[[Point], bool]]:
        size = len(batches.leaves(batch)[0])
        weights = next(iter(at.values())).new_ones((2, size))
        added = torch.zeros_like(weights)
        added[1, 0] = 1
        _, found = weighted_changes(task, at, batch, (_stack(self._directions(at)), weights, added))
        yield lambda point: point.known.agrees(_row(found, 0), 0)
        yield lambda point: point.known.agrees(each(lambda f, e: f - e[0] / size, _row(found, 1), point.examples), 1)

    def _example(self, task: Task, at: Params, batch: Any) -> Iterator[Callable[[Point], bool]]:
        size, u = len(batches.leaves(batch)[0]), self._directions(at)[0]
        for vectors in (u, each(lambda t: t.expand(size, *t.shape), u)):
            value, curved = example_products(task, at, batch, vectors)
            mean = each(lambda t: t.mean(0), curved)
            yield lambda point, value=value: _near(value, point.examples, point)
            yield lambda point, mean=mean: point.known.agrees(mean, 0)

    def _outer(self, task: Task, at: Params, batch: Any) -> Iterator[Callable[[Point], bool]]:
        for fisher in (False, True):
            value, curved, reads = outer_products(task, at, batch, _stack(self._directions(at)), fisher=fisher)
            yield lambda point, value=value: _near(value, point.known.gradient, point)
            yield lambda point, reads=reads: all(point.agree_reads(reads[i], i) for i in (0, 1))
            wanted = self._fisher if fisher else self._gauss_newton
            yield lambda point, c=curved, w=wanted: w(task, point, batch, _row(c, 0))

    def _slope(self, task: Task, at: Params, batch: Any) -> Iterator[Callable[[Point], bool]]:
        """The gradient of the losses' mean against differences of that mean itself."""
        u, step = self._directions(at)[0], 1e-6 if task.is_wide else 1e-3

        def mean(params: Params) -> Tensor:
            with task.unstopped():
                return task.query_losses(params, batch).mean()

        found = grad(mean)(at)
        ends = [task.query_losses(each(lambda p, d: p + s * d, at, u), batch).mean() for s in (step, -step)]  # noqa: B023
        change = float(ends[0] - ends[1]) / (2 * step)
        scale = max(abs(change), FLOOR * norm(found) * norm(u))
        yield lambda point: abs(inner(found, u) - change) <= max(1e-4, point.known.tolerance) * scale

    def _fisher(self, task: Task, point: Point, _batch: Any, found: Params) -> bool:
        u, size = point.known.directions[0], len(next(iter(point.examples.values())))
        bare = each(lambda e, p: e - task.l2 * p, point.examples, point.at)
        read = sum((bare[n] * u[n]).reshape(size, -1).sum(1) for n in u) / size
        wanted = each(lambda b, d: torch.tensordot(read, b, 1) + task.l2 * d, bare, u)
        return norm(each(torch.sub, found, wanted)) <= point.known.tolerance * norm(wanted)

    def _gauss_newton(self, task: Task, point: Point, batch: Any, found: Params) -> bool:
        """Jᵀ A J u by differences of the outputs and of the loss's gradient in them, and a plain backward pass."""
        u, step = point.known.directions[0], 1e-5 if task.is_wide else 1e-2
        tracked = {name: tensor.detach().requires_grad_() for name, tensor in point.at.items()}
        outputs, targets = task.outputs(tracked, batch)
        with torch.no_grad():
            up, down = (task.outputs(each(lambda p, d: p + s * d, point.at, u), batch)[0] for s in (step, -step))  # noqa: B023
        change = (up - down) / (2 * step)

        def slope(at: Tensor) -> Tensor:
            leaf = at.detach().requires_grad_()
            return torch.autograd.grad(task.output_losses(leaf, targets).mean(), leaf)[0]

        bent = (slope(outputs + step * change) - slope(outputs - step * change)) / (2 * step)
        back = torch.autograd.grad(outputs, list(tracked.values()), bent, allow_unused=True)
        given = zip(u, back, strict=True)
        wanted = {n: (torch.zeros_like(u[n]) if b is None else b) + task.l2 * u[n] for n, b in given}
        kink = (up + down - 2 * outputs.detach()).norm() / (2 * step)
        if float(kink) > 1e-3 * float(change.norm()):
            return True  # not to be told by this difference
        scale = max(norm(wanted), 1e-2 * norm(point.known.gradient))
        return norm(each(torch.sub, found, wanted)) <= max(1e-3, point.known.tolerance) * scale


def _from(order: Sequence[Form], first: Form | None) -> Sequence[Form]:
    return () if first is None else order[list(order).index(first) :]


def _near(found: Params, known: Params, point: Point) -> bool:
    return norm(each(torch.sub, found, known)) <= point.known.tolerance * max(norm(known), 1e-3 * norm(point.examples))


def _stack(vectors: tuple[Params, Params]) -> Params:
    return each(lambda a, b: torch.stack([a, b]), *vectors)


def _row(stack: Params, i: int) -> Params:
    return each(lambda t: t[i], stack)


def _widened(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
