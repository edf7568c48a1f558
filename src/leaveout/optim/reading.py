"""Reads a live optimizer: which one it is, what it holds, and what its next step will use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leaveout._util.trees import PARAM
from leaveout.errors import InputError, UnsupportedError
from leaveout.optim.definition import FUSED, Definition, Group, Hyper, counter, listed
from leaveout.optim.registry import optimizers
from leaveout.optim.rule import DTYPES, TYPE, Rule, allowed_extras, has_kernel

NOTHING: Mapping[str, Any] = {}

CONSTANT = {bool, int, float, str, type(None)}
"""Types whose values never change."""


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside wrappers that hold it as ``.optimizer``, like accelerate's: the one to hook."""
    seen: set[int] = set()
    while id(optimizer) not in seen:
        seen.add(id(optimizer))
        inner = getattr(optimizer, "optimizer", None)
        optimizer = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    return optimizer


def rule_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Rule:
    """Return the rule of a ``torch.optim`` optimizer, or refuse with every reason listed."""
    optimizer = unwrapped(optimizer)
    definition = _definition(optimizer)
    problems = [
        f"parameter group {number} has differentiable=True; set differentiable=False"
        for number, group in enumerate(optimizer.param_groups)
        if group.get("differentiable")
    ]
    problems += definition.problems(optimizer.param_groups)
    groups, misplaced = _groups(optimizer, model)
    problems += misplaced
    if not groups and not problems:
        problems.append("no parameter of the model is trained; set requires_grad=True on those that should be")
    if problems:
        kind = type(optimizer).__name__
        raise UnsupportedError(
            f"The optimizer {kind} cannot be recorded: " + "; ".join(problems) + ".",
            code="optimizer-setting-not-supported",
        )
    further = [slot for slot, setting in definition.optional if _is_on(optimizer, setting)]
    needed = {
        name for group in optimizer.param_groups for name in _extras(definition, group, definition.settings(group, []))
    }
    extras = tuple(name for name in allowed_extras(definition) if name in needed)
    return Rule(definition.name, groups, (*definition.slots, *further), extras)


class Settings(NamedTuple):
    """What a step uses: a row of hyperparameters per group, and further rows for parameters with their own counts.

    ``places`` has the number of each parameter's row, in the order of ``rule.groups``; None if each is its group's.
    """

    hypers: list[Hyper]
    places: tuple[int, ...] | None = None


class HyperReader:
    """Reads what the next step will use; the settings of a group are read again only if one was assigned since.

    Args:
        optimizer: the optimizer, or a wrapper that holds it.
        rule: its rule.
        params: the parameters that are trained, by name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: Rule, params: Mapping[str, Tensor]) -> None:
        self._optimizer, self._rule, self._params = unwrapped(optimizer), rule, params
        self._trained: defaultdict[int, list[Tensor]] = defaultdict(list)  # those of each group
        for name, number in rule.groups.items():
            self._trained[number].append(params[name])
        self._read: dict[int, tuple[list[Any], Hyper]] = {}  # a group's values, and its settings made of these

    def next(self, *, gradients: bool = False) -> Settings:
        """Return the hyperparameters as the next step will use them.

        With ``gradients``, these exist already, and the counters of a parameter without one do not matter.
        """
        state, counted = self._optimizer.state, self._rule.definition.counted
        rows: list[Hyper] = []
        for number, group in enumerate(self._optimizer.param_groups):
            moving = (p for p in self._trained[number] if not gradients or p.grad is not None)
            counts = {counted(group, state.get(param, NOTHING)) for param in moving}
            if len(counts) != 1:  # unlike most training runs
                return self._uneven(gradients=gradients)
            rows.append(self._row(number, group, counts.pop()))
        return Settings(rows)

    def _row(self, number: int, group: Group, counts: tuple[float, ...]) -> Hyper:
        """Return a group's hyperparameters with these values of the counters."""
        row = dict(self._settings(number, group))
        row.update(zip(self._rule.definition.counters, counts, strict=True))
        return row

    def _settings(self, number: int, group: Group) -> Hyper:
        values, settings = self._read.get(number, ([], {}))
        if len(values) == len(group) and all(map(is_, values, group.values())):
            return settings
        settings = _group_hypers(self._rule, number, group, self._trained[number])
        if all(_is_constant(value) for name, value in group.items() if name != "params"):
            self._read[number] = list(group.values()), settings
        else:
            self._read.pop(number, None)
        return settings

    def _uneven(self, *, gradients: bool) -> Settings:
        """Return a row for each group, and further rows for parameters with counts of their own."""
        groups, state, counted = self._optimizer.param_groups, self._optimizer.state, self._rule.definition.counted
        further: list[Hyper] = []
        numbers: dict[tuple[int, tuple[float, ...]], int] = {}  # the row for each group and counts of its parameters
        first: dict[int, Hyper] = {}  # each group's own row, with the counts of its first parameter that moves
        places: list[int] = []
        for name, number in self._rule.groups.items():
            param = self._params[name]
            if gradients and param.grad is None:
                places.append(number)
                continue
            counts = counted(groups[number], state.get(param, NOTHING))
            if (number, counts) not in numbers:
                row = self._row(number, groups[number], counts)
                if number in first:
                    numbers[number, counts] = len(groups) + len(further)
                    further.append(row)
                else:
                    numbers[number, counts] = number
                    first[number] = row
            places.append(numbers[number, counts])
        for number, group in enumerate(groups):
            if number not in first:  # no parameter of this group moves
                first[number] = self._row(number, group, counted(group, NOTHING))
        rows = [first[number] for number in range(len(groups))]
        return Settings(rows + further, tuple(places) if further else None)


def _is_constant(value: Any) -> bool:
    """Say whether a setting can change only by assignment, unlike a tensor or a list.

    >>> _is_constant((0.9, 0.999)), _is_constant([0.9, 0.999]), _is_constant(torch.tensor(0.1))
    (True, False, False)
    """
    return all(map(_is_constant, value)) if type(value) is tuple else type(value) in CONSTANT


def buffers(optimizer: torch.optim.Optimizer, rule: Rule, param: Tensor) -> dict[str, Tensor]:
    """Return what the optimizer holds for one parameter, by slot; zeros for what does not exist yet."""
    state: Mapping[str, Any] = optimizer.state.get(param, {})
    held = {slot: state.get(slot) for slot in rule.own_slots if slot != PARAM}
    return {
        slot: param.new_zeros(rule.definition.shape(slot, param.shape)) if tensor is None else tensor
        for slot, tensor in held.items()
    }


def _definition(optimizer: torch.optim.Optimizer) -> Definition:
    for definition in optimizers().values():
        if definition.describes(optimizer):
            return definition
    if isinstance(optimizer, type):
        raise InputError(
            f"The optimizer is the class {optimizer.__name__}: give the one that the loop steps.",
            code="optimizer-expected",
        )
    kind, home = type(optimizer).__name__, type(optimizer).__module__.split(".")[0]
    kind = f"{home}'s {kind}" if kind in optimizers() and home != "torch" else kind  # another of the same name
    above = [one.__name__ for one in type(optimizer).__mro__[1:] if one.__name__ in optimizers()]
    why = f", because it overrides the step of {above[0]}: train" if above else ": train"
    raise UnsupportedError(
        f"The optimizer {kind} cannot be replayed exactly{why} with torch.optim.{listed(optimizers())}.",
        code="optimizer-not-supported",
    )


def _groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, int], list[str]]:
    """Return the group of each trained parameter in the model's order, and the problems with that."""
    names = {id(param): name for name, param in model.named_parameters()}
    problems: list[str] = []
    groups: dict[str, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        strangers = [tuple(param.shape) for param in group["params"] if id(param) not in names]
        if strangers:
            problems.append(
                f"parameter group {number} holds {len(strangers)} tensors that are not parameters of the model (the "
                f"first has shape {strangers[0]}); build the optimizer from this model's own parameters"
            )
        trained = [param for param in group["params"] if id(param) in names and param.requires_grad]
        groups |= {names[id(param)]: number for param in trained}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and n not in groups]
    if missing and groups:
        problems.append(
            f"{', '.join(map(repr, missing))} need gradients but are in no group; give them to the optimizer or freeze "
            "them"
        )
    return {name: groups[name] for name, _ in model.named_parameters() if name in groups}, problems


def _group_hypers(rule: Rule, number: int, group: Group, params: list[Tensor]) -> Hyper:
    """Return a group's hyperparameters except the counters; refuse a setting that was not on from the start."""
    definition = rule.definition
    settings = definition.settings(group, params)
    extras = _extras(definition, group, settings)
    new = [setting for slot, setting in definition.optional if group[setting] and slot not in rule.slots]
    new += [name for name in extras if name not in rule.extras]
    if new:
        change = f"made {new[0].removesuffix(TYPE)} a tensor" if new[0].endswith(TYPE) else f"turned {new[0]} on"
        raise UnsupportedError(
            f"Parameter group {number} {change} while training: start with it so.", code="optimizer-changed"
        )
    hyper = {name: float(value) for name, value in settings.items()}
    return hyper | {name: extras.get(name, 0.0) for name in rule.extras}


def _extras(definition: Definition, group: Group, settings: Mapping[str, Any]) -> Hyper:
    """Return the extra columns that a group needs: options that are on, dtypes of hyperparameters that are tensors."""
    extras = {name: 1.0 for name in definition.options if group.get(name)}
    if group.get("fused"):  # its kernel takes the values and computes in its own precision
        return {**extras, FUSED: 1.0} if has_kernel(definition) else extras
    for name, value in settings.items():
        if isinstance(value, Tensor) and value.dtype in DTYPES[1:]:
            extras[f"{name}{TYPE}"] = float(DTYPES.index(value.dtype))
    if group.get("capturable"):  # then the counters are not turned into numbers before they are used
        typed = counter(0.0, group, torch.zeros(())).dtype
        extras |= {f"{name}{TYPE}": float(DTYPES.index(typed)) for name in definition.counters if typed in DTYPES[1:]}
    return extras


def _is_on(optimizer: torch.optim.Optimizer, setting: str) -> bool:
    return any(group[setting] for group in optimizer.param_groups)
