"""Finds what cannot be handled exactly, before anything runs: all problems at once, each with its remedy."""

from __future__ import annotations

import sys
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.utils.data import Dataset

from leaveout._util.trees import Params, each
from leaveout.errors import InputError, UnsupportedError, first_line, is_whole, kind_of
from leaveout.task import batches
from leaveout.task.batches import Collate
from leaveout.task.guard.compare import compared, tried
from leaveout.task.guard.culprit import nodes
from leaveout.task.objective import Objective
from leaveout.task.preparing import trial_ids


def examined(
    objective: Objective, train_set: Dataset, collate: Collate | None, *, check: bool
) -> tuple[Objective, bool]:
    """Return the objective with what a trial on some examples shows of it, and whether the data differ when read again.

    Raises:
        UnsupportedError: naming the problems that occur.
    """
    ids = trial_ids(objective, range(batches.size(train_set)))
    try:
        batch, again = (batches.to(batches.read(train_set, ids, collate), objective.device) for _ in range(2))
    except InputError:
        raise
    except Exception as error:
        raise refusal([f"training examples cannot be read: {first_line(error)}"]) from error
    random_data = batches.fingerprint(batch) != batches.fingerprint(again)
    if problem := _structure_problem(batch, len(ids)):
        raise refusal([problem])
    params = {name: param.detach().clone() for name, param in objective.parameters().items()}
    if not params:
        raise refusal(["no parameter of the model is trained; set requires_grad=True on those that should be"])
    objective = replace(objective, counted=_counted(objective, params, batch, len(ids)))
    problem, abilities = (compared if check else tried)(objective, params, batch)
    refuse([problem] if problem else [])
    return objective.able(abilities), random_data


def check_penalty(objective: Objective) -> None:
    """Refuse a penalty that is not one number computed from the parameters, with a first and a second derivative."""
    penalty = objective.penalty
    if penalty is None:
        return
    params = {name: param.detach() for name, param in objective.parameters().items()}
    try:
        value = penalty(params)
        problem = None if isinstance(value, Tensor) and value.shape == () else f"returns {kind_of(value)}"
        if problem is None:
            vmap(lambda one: jvp(grad(penalty), (params,), (one,))[1])(each(lambda t: t[None], params))
    except Exception as error:  # noqa: BLE001 - whatever the function raises
        problem = f"fails: {first_line(error)}"
    if problem:
        raise InputError(
            f"penalty= {problem}; it must be a function of the trained parameters by name that returns one number, as "
            "lambda params: 1e-4 * sum(p.square().sum() for p in params.values()) does.",
            code="penalty-not-a-number",
        )


def _counted(objective: Objective, params: Params, batch: Any, count: int) -> bool:
    """Call the model and the loss on some examples, refuse problems, and say whether the loss counts its examples.

    ``params`` are copies of the parameters, to which the model is restored if its forward pass changes them.
    """
    buffers = {n: (buffer.clone(), batches.fingerprint(buffer)) for n, buffer in objective.model.named_buffers()}
    rng = torch.get_rng_state()
    try:
        with torch.no_grad():
            outputs, targets = objective.outputs(objective.parameters(), batch)
            losses = objective.parts.losses(outputs, targets)  # its shape is checked below
            counted = objective.parts.counts is not None and objective.parts.counts(outputs, targets) is not None
    except InputError:
        raise
    except Exception as error:
        raise refusal([f"the model or the loss fails on training examples: {first_line(error)}"]) from error
    refuse(_side_effects(objective.model, buffers, rng))
    problem = _changed_parameter(objective, params) or _shape_problem(losses, count)
    problem = problem or _own_use(objective, params, batch)
    refuse([problem] if problem else [])
    return counted


def _changed_parameter(objective: Objective, params: Params) -> str | None:
    """Return the problem that a forward pass has changed parameters, after restoring these copies of them."""
    changed = [name for name, param in objective.parameters().items() if not torch.equal(param, params[name])]
    if not changed:
        return None
    with torch.no_grad():
        for name in changed:
            objective.parameters()[name].copy_(params[name])
    return (
        f"the forward pass changes the parameter {changed[0]!r}; only the optimizer may change parameters "
        "(for an embedding's max_norm: normalise the looked-up vectors instead)"
    )


def _own_use(objective: Objective, params: Params, batch: Any) -> str | None:
    """Return the problem that the outputs depend on the model's own parameters where copies are given instead."""
    with torch.enable_grad():
        outputs, _ = objective.outputs(params, batch)
    own = {id(param): name for name, param in objective.parameters().items()}
    used = {own[id(node.variable)] for node in nodes(outputs) if id(getattr(node, "variable", None)) in own}
    if not used:
        return None
    return (
        f"the model computes with its own {min(used)!r} even if it is called with other values "
        "(torch.func.functional_call), as models of Keras do, so that it cannot be evaluated at the recorded states; "
        "let forward read each parameter from its module, and keep neither it nor anything made of it elsewhere"
    )


def _structure_problem(batch: Any, count: int) -> str | None:
    for i, leaf in enumerate(batches.leaves(batch)):
        if not isinstance(leaf, Tensor):
            return (
                f"item {i} of a batch is a {type(leaf).__name__}, not a tensor; "
                "give collate= a function that returns tensors only"
            )
        if leaf.ndim == 0 or len(leaf) != count:
            return (
                f"tensor {i} of a batch of {count} examples has shape {list(leaf.shape)}; its first dimension must "
                "count the examples (collate= says how a batch is built)"
            )
    return None


def _side_effects(model: nn.Module, buffers: dict[str, tuple[Tensor, Any]], rng: Tensor) -> list[str]:
    """List random draws and changes of buffers, and restore the generator and the buffers to these states."""
    problems = []
    if not torch.equal(torch.get_rng_state(), rng):
        torch.set_rng_state(rng)
        problems.append("the forward pass draws random numbers in evaluation mode; make it a function of its inputs")
    changed = [name for name, buffer in model.named_buffers() if batches.fingerprint(buffer) != buffers[name][1]]
    for name in changed:
        model.get_buffer(name).copy_(buffers[name][0])
    if changed:
        which = f"the buffer {changed[0]!r}" if len(changed) == 1 else f"{len(changed)} buffers ({changed[0]!r}, ...)"
        problems.append(f"the forward pass changes {which} in evaluation mode; leave them as they are there")
    return problems


def _shape_problem(losses: Tensor, count: int) -> str | None:
    if losses.shape == (count,):
        return None
    return (
        f"the loss of {count} examples has shape {list(losses.shape)} instead of [{count}]; "
        "give an nn loss module, or a callable that returns one loss per example (reduction='none')"
    )


def check_options(model: Any, loss: Any, train_set: Any, l2: Any, statistics: str, accumulation: str | int) -> None:
    """Refuse invalid arguments of a task."""
    if not isinstance(model, nn.Module) or isinstance(model, nn.modules.loss._Loss):
        raise InputError(
            f"A model is needed first, not {kind_of(model)}: give lo.Task(model, loss, train_set).",
            code="model-expected",
        )
    if isinstance(loss, type):
        raise InputError(
            f"The loss is the class {loss.__name__}: give one of its kind, {loss.__name__}().", code="loss-expected"
        )
    if not callable(loss):
        raise InputError(
            f"A loss is needed second, not {kind_of(loss)}: give an nn loss module, or a function "
            "(outputs, targets) -> one loss per example.",
            code="loss-expected",
        )
    if batches.size(train_set) == 0:
        raise InputError("The training set is empty: give one with at least one example.", code="train-set-empty")
    if not is_strength(l2):
        raise InputError(f"l2={l2!r} must be a finite number, 0 or more.", code="l2-out-of-range")
    if statistics not in ("leave", "stay"):
        raise InputError(f"statistics={statistics!r} is unknown: use 'leave' or 'stay'.", code="statistics-unknown")
    if accumulation not in ("mean", "sum", "window") and not is_whole(accumulation, 1):
        raise InputError(
            f"accumulation={accumulation!r} is unknown: use 'mean', 'sum', 'window' or a whole number from 1 on.",
            code="accumulation-unknown",
        )


def is_strength(value: Any) -> bool:
    """Say whether a value is a finite number, 0 or more."""
    real = isinstance(value, Real)
    return real and bool(0 <= value <= sys.float_info.max)


def refuse(problems: list[str]) -> None:
    """Raise all problems at once."""
    if problems:
        raise refusal(problems)


def refusal(problems: list[str]) -> UnsupportedError:
    """Return the error that names these problems."""
    return UnsupportedError(
        "This task cannot be handled exactly:\n" + "\n".join(f"  - {p}" for p in problems), code="task-not-supported"
    )
