"""The guard for batches whose examples depend on each other: BatchNorm in training mode, draws that all share.

The step's function is G(θ, r; w) = (ḡ, r'), with r the model's buffers. What the methods compute from it is compared
with the model itself, called in training mode with PyTorch's own kernels and differentiated by plain autograd: the
value, its derivative by central differences, and the value without an example, by removing it from the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from leaveout._util.trees import Params, distance, each, norm, sum_of
from leaveout.diff.forms import COUPLED, Abilities, Form
from leaveout.diff.hessian import Hessian
from leaveout.diff.operator import gradient, stacked_gradients
from leaveout.errors import LeaveoutError, first_line
from leaveout.task import batches
from leaveout.task.draws import note, replay
from leaveout.task.guard.differences import MISSING, Difference, are_transposed, difference, inner, like, padding_rows
from leaveout.task.objective import Objective
from leaveout.task.rewrites.missing_rules import batched
from leaveout.task.training_batch import TrainingBatch

LEAVING = "leaving an example out"


def coupled_defaults(objective: Objective, before: Abilities | None) -> Abilities:
    """Return the abilities of the forms that differentiate the whole step, without any per-example terms."""
    base = before or Abilities(vmap=True, stacks=True)
    own = carried(objective)  # written by the model's own code, which may read it as a number
    return Abilities(
        vmap=base.vmap and not own,
        stacks=base.stacks and not own,
        reads=True,
        vector=Form.TRANSPOSED if base.hidden else Form.REVERSE_REVERSE,
        vectors=Form.TRANSPOSED if base.hidden else Form.REVERSE_REVERSE,
        changes=Form.THROUGH if base.hidden else Form.FORWARD_REVERSE,
        symmetric=not objective.coupled and base.symmetric,
        hidden=base.hidden,
        stops=base.stops,
        slope=base.slope,
        reason=COUPLED if objective.coupled else "random draws of the forward pass cannot be told apart by example",
    )


def coupled_abilities(
    objective: Objective, params: Params, batch: TrainingBatch, before: Abilities | None
) -> tuple[str | None, Abilities]:
    """Return a problem that no method can handle, or the task's abilities."""
    abilities = coupled_defaults(objective, before)
    try:
        wide, given = objective.to_float64(), batches.to_float64(batch)
        at = batches.to_float64(objective.variables(params) | params)
        counters = [name for name, held in wide.model.named_buffers() if not held.is_floating_point()]
        measured = difference(_plain(wide, given), at, padding=padding_rows(wide.model), counters=counters)
    except LeaveoutError:
        raise
    except Exception as error:  # noqa: BLE001 - a model that insists on its own dtype, or fails; reported as a problem
        return f"its gradient cannot be computed in training mode ({first_line(error)})", abilities
    problems = set()
    for changes in _fallbacks(abilities):
        abilities = abilities._replace(**changes)
        able = wide.able(abilities)
        try:
            problem = _differs(able, at, given, measured, abilities)
        except MISSING:
            continue
        if problem is None:
            if not (objective.coupled or _maps(wide, at, given)):
                abilities = abilities._replace(vmap=False)
            return None, _quickest(able, at, given, abilities)
        problems.add(problem)
    if problems == {LEAVING}:
        return (
            "an example that is left out would change the others' losses by more than BatchNorm's statistics, which "
            "alone it can leave; keep it in the batch with Task(statistics='stay')",
            abilities,
        )
    return (
        "its step in training mode cannot be differentiated rightly by torch.func; Replay() needs no such derivative",
        abilities,
    )


def _maps(objective: Objective, at: Params, batch: TrainingBatch) -> bool:
    """Say whether ``vmap`` can take one example after the other in training mode: other batches may be separable."""
    only = batches.map_leaves(lambda leaf: leaf[:1], batch.batch)

    def losses(example: Any, within: Any = None) -> Tensor:
        return objective.parts.losses(*objective.called.pure(at, example, objective.mode.training, within)[0])

    def one(example: Any, own: Params) -> Tensor:
        return losses(batches.map_leaves(lambda leaf: leaf[None], example), replay(own))

    try:
        with torch.no_grad(), batched():
            draws = note(lambda: losses(only), {"cpu": torch.Generator().manual_seed(0).get_state()})
            vmap(one)(only, each(lambda t: t[None], draws))
    except MISSING:
        return False
    return True


def _fallbacks(abilities: Abilities) -> list[dict[str, Any]]:
    """Return what to change in these abilities, one thing after the other, until all derivatives are correct."""
    batched = {"vmap": abilities.vmap, "stacks": abilities.stacks}
    return [
        {},
        {"vmap": False},
        {"stacks": False},
        {**batched, "changes": Form.REVERSE_REVERSE},
        {"vmap": False},
        {**batched, "changes": abilities.changes, "vector": Form.TRANSPOSED, "vectors": Form.TRANSPOSED},
        {"vmap": False},
        {"changes": Form.THROUGH},
        {"changes": None},
    ]


def _quickest(objective: Objective, at: Params, batch: TrainingBatch, abilities: Abilities) -> Abilities:
    """Return the same with the fastest form for one vector, if its results agree with the others'."""
    if not abilities.vmap or abilities.vector is Form.TRANSPOSED:
        return abilities
    vector = like(objective.variables(at), torch.Generator().manual_seed(0))
    quick = abilities._replace(vector=Form.REVERSE_FORWARD)
    products = []
    try:
        for one in (abilities, quick):
            curved, reads, *_ = Hessian(objective.able(one), at, batch).pull(each(lambda t: t[None], vector))
            products.append((curved, {"weights": reads}))
    except MISSING:
        return abilities
    same = all(_near(computed, wanted) for wanted, computed in zip(*products, strict=True))
    return quick if same else abilities


def _differs(
    objective: Objective, at: Params, batch: TrainingBatch, measured: Difference | None, abilities: Abilities
) -> str | None:
    """Return which quantity disagrees with the model itself; None if none does."""
    value = gradient(objective, at, batch)
    plain = _plain(objective, batch)(at)
    if not _near(value, {name: plain[name] for name in value}):
        return "gradient"
    size = len(batches.leaves(batch)[0])
    if size > 2 and objective.statistics == "leave" and not batch.whole:
        weights = next(iter(at.values())).new_ones((2, size))
        weights[1, 0] = 0
        less = _without_first(objective, at, batch)
        stacked = stacked_gradients(objective, each(lambda t: torch.stack([t, t]), at), weights, batch)
        gradients = {name: stacked[name][1] for name in less}
        if less and not _near(gradients, less):
            return LEAVING
    if measured is None:
        return None
    stack = {name: torch.stack([d[name] for d in measured.directions]) for name in objective.variables(at)}
    curved, reads, *_ = Hessian(objective, at, batch).pull(stack)
    for which in (0, 1):
        if not measured.agrees_transposed(each(lambda t, i=which: t[i], curved), which):
            return "pull-back"
    if abilities.changes is not None:
        ones = stack[next(iter(stack))].new_ones((2, size))
        pushed, _ = Hessian(objective, at, batch).push(stack, ones, torch.zeros_like(ones))
        if not all(measured.agrees(each(lambda t, i=which: t[i], pushed), which) for which in (0, 1)):
            return "derivative along a vector"
        if not are_transposed(curved, pushed, stack, measured.gradient):
            return "pull-back"
    return None if _reads_right(objective, at, batch, measured, reads) else "derivative in the weights"


def _without_first(objective: Objective, at: Params, batch: TrainingBatch) -> Params:
    """Compute what a batch without its first example gives, by the model itself; a carried state keeps the example."""
    held = carried(objective)
    size = len(batches.leaves(batch)[0])
    rest = batches.map_leaves(lambda leaf: leaf[1:], batch)
    try:
        less = _plain(objective, rest, (size - 1) / size)(at)
    except RuntimeError:
        if not held:
            raise
        return {}  # a state with a row for each example
    return {name: value for name, value in less.items() if name not in held}


def carried(objective: Objective) -> set[str]:
    """Return the moving buffers that are no statistics of PyTorch's norms: no example can leave them.

    There is no weight of an example in the model's own code; its loss is left out, and it stays in the state.
    """
    norms = {name for name, module in objective.called.named if isinstance(module, nn.modules.batchnorm._NormBase)}
    return {name for name in objective.mode.buffers if name.rpartition(".")[0] not in norms}


def _reads_right(objective: Objective, at: Params, batch: TrainingBatch, measured: Difference, reads: Tensor) -> bool:
    """Compare the derivative in the examples' weights with differences of the gradient."""
    step = 1e-5 if objective.is_wide else 1e-2
    change = torch.linspace(-1, 1, reads.shape[1], dtype=reads.dtype, device=reads.device)
    weights = 1 + step * torch.stack([change, -change])
    moved = stacked_gradients(objective, each(lambda t: torch.stack([t, t]), at), weights, batch)
    slope = each(lambda t: (t[0] - t[1]) / (2 * step), moved)
    scale = norm(slope) + 1e-3 * norm(measured.gradient)
    near = 1e-5 if objective.is_wide else 2e-2
    return all(
        abs(float(own @ change) - inner(slope, u)) <= near * norm(u) * scale
        for own, u in zip(reads, measured.directions, strict=True)
    )


def _plain(objective: Objective, batch: TrainingBatch, share: float = 1.0) -> Callable[[Params], Params]:
    """Compute (ḡ, r') by the model itself; ``share`` rescales the loss of a batch to another's denominator."""
    model = copy.deepcopy(objective.model)
    for name, module in model.named_modules():
        module.training = name in objective.mode.training
    for name, param in model.named_parameters():  # some may be frozen by now
        param.requires_grad_(name in objective.names)
    draws = batch.whole

    def slope(params: Params) -> Params:
        named = dict(model.named_parameters())
        held = dict(model.named_buffers())
        with torch.no_grad():
            for name, value in params.items():
                (named if name in named else held)[name].copy_(value)
        trained = [named[name].requires_grad_() for name in objective.chosen]  # some may be frozen by now
        with torch.enable_grad(), replay(draws) if draws else nullcontext():
            outputs, targets = objective.called.rule(model, batch.batch)
            losses = objective.parts.losses(outputs, targets)
            scaled = losses * batch.scale if isinstance(batch.scale, torch.Tensor) else losses
            penalty = (
                0.5 * objective.l2 * sum_of(named[name].square().sum() for name in objective.names)
                if objective.l2
                else 0
            )
            gradients = torch.autograd.grad(share * (scaled.mean() + penalty), trained, allow_unused=True)
        slopes = {
            name: torch.zeros_like(tensor) if g is None else g
            for name, tensor, g in zip(objective.chosen, trained, gradients, strict=True)
        }
        held = dict(model.named_buffers())  # a module may have put another tensor in the place of one
        moved = {name: held[name].detach().clone().to(params[name]) for name in objective.mode.buffers}
        return {**slopes, **moved}

    return slope


def _near(computed: Params, wanted: Params) -> bool:
    dtype = next(iter(wanted.values())).dtype
    near = 1e-7 if dtype == torch.float64 else 1e-3
    return distance(computed, wanted) <= near * max(norm(wanted), 1e-12)
