"""Steps that did not move all parameters alike: some were frozen, unused, or had different step counts.

For such a step a shard has a row of hyperparameters per parameter group, further rows where needed, and for each
parameter the number of its row, or a mark that it did not move. When read, parameters that were treated alike at every
step form a group, so that a step again has one row per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from leaveout.optim import IDLE, STILL, Hyper, Rule, Settings

PLACES = "step/places"
"""For each step, its number of rows, and each parameter's place."""
STAYED = -1


def idle(place: int) -> int:
    """Convert the number of a row to the place of a parameter that steps with a zero gradient, and back.

    >>> idle(0), idle(idle(3))
    (-2, 3)
    """
    return -2 - place


def with_places(settings: Settings, rule: Rule, params: dict[str, Tensor]) -> Settings:
    """Return the settings with each parameter's place: which ones the step leaves out, or moves by a zero gradient."""
    if all(param.grad is not None and param.requires_grad for param in params.values()):
        return settings
    rows = settings.places or tuple(rule.groups.values())
    places = []
    for row, name in zip(rows, rule.groups, strict=True):
        param = params[name]
        if param.grad is None:
            places.append(STAYED)
        elif param.requires_grad:
            places.append(row)
        else:
            places.append(idle(row))  # frozen, with a zero gradient
    return settings._replace(places=tuple(places))


def written(rule: Rule, steps: Sequence[Settings]) -> dict[str, Tensor]:
    """Return the tensors for a shard's steps: their hyperparameters, and the places if any step has them."""
    names, most = rule.hypers, max(len(step.hypers) for step in steps)
    padded = [[*step.hypers, *[step.hypers[0]] * (most - len(step.hypers))] for step in steps]
    values = [[[hyper[name] for name in names] for hyper in rows] for rows in padded]
    tensors = {"hypers": torch.tensor(values, dtype=torch.float64)}
    if any(step.places is not None for step in steps):
        usual = tuple(rule.groups.values())
        places = [(len(step.hypers), *(usual if step.places is None else step.places)) for step in steps]
        tensors[PLACES] = torch.tensor(places)
    return tensors


def read(rule: Rule, shard: dict[str, Tensor], offset: int) -> Settings:
    """Return one step's hyperparameters and places, as they were written."""
    rows = [dict(zip(rule.hypers, values, strict=True)) for values in shard["hypers"][offset].tolist()]
    if PLACES not in shard:
        return Settings(rows)
    count, *places = shard[PLACES][offset].tolist()
    return Settings(rows[:count], None if places == list(rule.groups.values()) else tuple(places))


def is_sound(rule: Rule, shard: dict[str, Tensor], steps: int) -> bool:
    """Say whether the places are valid for this number of steps of a run with these parameters."""
    if PLACES not in shard:
        return True
    places, most = shard[PLACES], shard["hypers"].shape[1]
    if places.dtype != torch.int64 or places.shape != (steps, 1 + len(rule.groups)):
        return False
    counts, places = places[:, 0], places[:, 1:]
    least = max(rule.groups.values()) + 1
    inside = (counts >= least) & (counts <= most)
    return bool(inside.all()) and bool(((places < counts[:, None]) & (places >= -1 - counts[:, None])).all())


def refined(rule: Rule, shards: Sequence[dict[str, Tensor]]) -> tuple[Rule, list[str]]:
    """Return the rule with parameters grouped by having the same row at every step, and one parameter per group."""
    usual = torch.tensor([list(rule.groups.values())])
    history = torch.cat([usual, *(shard[PLACES][:, 1:] for shard in shards if PLACES in shard)])
    numbers: dict[tuple[int, ...], int] = {}
    groups, first = {}, []
    for name, column in zip(rule.groups, history.T.tolist(), strict=True):
        if tuple(column) not in numbers:
            numbers[tuple(column)] = len(numbers)
            first.append(name)
        groups[name] = numbers[tuple(column)]
    return replace(rule, groups=groups), first


def of_groups(rule: Rule, first: Sequence[str], settings: Settings) -> list[Hyper]:
    """Return a step's hyperparameters for each refined group, with marks for groups that did not move or were idle."""
    places = dict(zip(rule.groups, settings.places or rule.groups.values(), strict=True))
    rows = []
    for name in first:
        place = places[name]
        if place == STAYED:
            rows.append({**settings.hypers[rule.groups[name]], STILL: 1.0})
        elif place < STAYED:
            rows.append({**settings.hypers[idle(place)], IDLE: 1.0})
        else:
            rows.append(settings.hypers[place])
    return rows
