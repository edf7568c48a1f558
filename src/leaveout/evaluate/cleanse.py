"""Rank, remove, retrain: the test loss without the examples that scores call harmful."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import Dataset

from leaveout._util.trees import Params
from leaveout.compute.cost import Cost
from leaveout.compute.jobs import Shard, completed
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, LeaveoutWarning, check_seed
from leaveout.estimators.query import Query, query_fingerprint
from leaveout.evaluate.curve import COLUMNS, MEASURED, NOTHING, RANDOM, Curve
from leaveout.evaluate.label_issues import Labels
from leaveout.run.reader import Run
from leaveout.scores import Scores
from leaveout.sweep import budget
from leaveout.task.batches import Batch
from leaveout.task.task import Task
from leaveout.trajectory.identity import identity
from leaveout.trajectory.left_out import LeftOut, rows_of
from leaveout.trajectory.replay import counterfactuals, shuffled
from leaveout.trajectory.trajectory import Trajectory

Choice: TypeAlias = tuple[dict[str, Any], tuple[int, ...]]


def cleanse(
    scores: Scores | Labels | Sequence[Scores | Labels],
    run: Run,
    task: Task,
    test_set: Dataset,
    remove: int | Sequence[int] = (10, 100, 1000),
    *,
    random: int = 5,
    shuffles: int = 0,
    seed: int = 0,
    resources: Resources | None = None,
) -> Curve:
    """Remove the most harmful examples, train again from the start, and measure on the test set.

    Removed examples have weight zero in the recorded batches, as when they are left out one at a time. Only harmful
    examples are removed: if a method finds fewer harmful ones than are to be removed, all of those are, with a warning.
    As a control, the same number of the scored examples is removed at random.

    Args:
        scores: of single examples, by one method or several; or the result of ``labels``, to remove those that look
            wrong.
        run: the run that was scored.
        task: what was trained.
        test_set: examples that neither training nor the scores have seen.
        remove: how many to remove: a number, or several.
        random: the number of random choices for each of these numbers; 0 for no control.
        shuffles: 0 trains once, with the recorded batches; k trains k times, each in a fresh order of the examples, so
            that the intervals have the noise of training too.
        seed: for the random choices and the fresh orders.
        resources: memory budget, progress, engine, and where finished trainings are stored.
    """
    rankings = [scores] if isinstance(scores, Scores | Labels) else list(scores)
    methods = [one.to_scores() if isinstance(one, Labels) else one for one in rankings]
    amounts = _checked(methods, run, task, [remove] if isinstance(remove, int) else remove, random, shuffles)
    check_seed(seed, 0, 2**32 - 1)
    ranked, scored = _ranked(methods, amounts[-1]), sorted({int(i) for one in methods for i in one.train_ids})
    resources, cost = (resources or Resources()).on(task.device), Cost()
    trajectory = Trajectory(run, task)
    query = Query(task, trajectory.scored(trajectory.final()), test_set, single=True, resources=resources.inside())
    query.check()
    seen = _seen(methods, query, task, test_set)
    rows: list[dict[str, Any]] = []
    with cost.metered(task.device):
        for order in range(max(1, shuffles)):
            again = Again(trajectory, query, resources.inside(), _mixed(seed, order) if shuffles else None)
            chosen = _chosen(ranked, scored, amounts, range(order * random, (order + 1) * random), seed)
            rows += [{**row, "order": order} for row in _trained(again, chosen, resources, cost)]
    table = pd.DataFrame(rows)[list(COLUMNS)]
    harmful = {scores.method: scores.harmful_count for scores in methods}
    return Curve(table, "shuffled" if shuffles else "recorded", query.size, cost, run.fingerprint, harmful, seen)


def _checked(
    methods: list[Scores], run: Run, task: Task, remove: Sequence[int], random: int, shuffles: int
) -> list[int]:
    if not methods:
        raise InputError("No scores were given: give those of at least one method.", code="cleanse-without-scores")
    names = [scores.method for scores in methods]
    if len(set(names)) < len(names) or {NOTHING, RANDOM} & set(names):
        raise InputError(
            f"The methods' names {names} are not all different: give each method's scores once.",
            code="methods-repeated",
        )
    for scores in methods:
        scores.check_same_run(run)
        if any(isinstance(i, str) for i in scores.train_ids):
            raise InputError(
                f"{scores.method} scored groups: cleanse removes examples; score those.",
                code="groups-cannot-be-removed",
            )
        if not all(0 <= int(i) < task.size for i in scores.train_ids):
            raise InputError(
                f"{scores.method} scored examples that the task does not have: give the scores of this run.",
                code="scores-of-other-examples",
            )
    amounts = sorted({int(m) for m in remove})
    most = min(len(scores.train_ids) for scores in methods)
    if not amounts or amounts[0] < 1 or amounts[-1] > most:
        raise InputError(
            f"remove={list(remove)} must be numbers from 1 to {most}, the examples that are scored.",
            code="remove-out-of-range",
        )
    if random < 0 or shuffles < 0:
        raise InputError(
            f"random={random} and shuffles={shuffles} count trainings: give 0 or more.", code="trainings-not-a-count"
        )
    return amounts


def _seen(methods: list[Scores], query: Query, task: Task, test_set: Dataset) -> str:
    """Return where training or scores have seen the test set, with a warning; empty if they have not."""
    fingerprint, same_size = query.fingerprint(), query.size == task.size
    if test_set is task.train_set or (same_size and fingerprint == query_fingerprint(task, task.train_set)):
        seen = "the training set"
    elif any(scores.query_fingerprint == fingerprint for scores in methods):
        seen = "the query set, whose loss the scores explain"
    else:
        return ""
    warnings.warn(
        f"The test set is {seen}: what is removed was chosen by it, so that the result looks better than it is. Give "
        "examples that neither training nor the scores have seen, such as half of the query set kept apart.",
        LeaveoutWarning,
        stacklevel=3,
    )
    return seen


def _ranked(methods: list[Scores], most: int) -> dict[str, list[int]]:
    """Rank the most harmful examples by each method, and only harmful ones."""
    few = [scores for scores in methods if scores.harmful_count < most]
    counts = ", ".join(f"{scores.harmful_count} by {scores.method}" for scores in few)
    if all(scores.harmful_count == 0 for scores in methods):
        raise InputError(
            "No example is harmful by these scores, so that there is nothing to remove: keep them all.",
            code="nothing-harmful",
        )
    if few:
        warnings.warn(
            f"Fewer than {most} examples are harmful ({counts}): no more than those are removed.",
            LeaveoutWarning,
            stacklevel=3,
        )
    return {
        scores.method: [int(i) for i in scores.harmful(min(most, scores.harmful_count))]
        for scores in methods
        if scores.harmful_count
    }


def _chosen(
    ranked: dict[str, list[int]], scored: list[int], amounts: list[int], draws: range, seed: int
) -> list[Choice]:
    """Choose what to remove, with a description of each choice."""
    chosen, removed = [], set()
    for method, worst in ranked.items():
        own = sorted({min(m, len(worst)) for m in amounts})
        chosen += [({"choice": method, "removed": m, "draw": 0}, tuple(sorted(worst[:m]))) for m in own]
        removed |= set(own)
    for draw in draws:
        order = torch.randperm(len(scored), generator=torch.Generator().manual_seed(_mixed(seed, draw))).tolist()
        order = [scored[place] for place in order]
        chosen += [({"choice": RANDOM, "removed": m, "draw": draw}, tuple(sorted(order[:m]))) for m in sorted(removed)]
    return chosen


@dataclass(frozen=True)
class Again:
    """Trains again without some examples, with the recorded batches or, given a seed, in a fresh order."""

    trajectory: Trajectory
    query: Query
    resources: Resources
    order: int | None

    def __call__(self, item: tuple[LeftOut, Path | None]) -> Shard:
        """Measure the models: one row per row of left-out examples, and one with every example."""
        cost = Cost()
        if self.order is None:
            params = counterfactuals(self.trajectory, item[0], 0.0, self.resources, cost)
        else:
            params = shuffled(self.trajectory, item[0], self.order, self.resources, cost)
        return Shard({"measured": _measured(self.query, params)}, cost)

    def identity(self) -> str:
        """Return a key for everything that its shards have in common."""
        query, name = self.query, "cleanse in pairs"
        return identity(self.trajectory.run, query.task, query.params, name, query.fingerprint(), self.order)


def _trained(again: Again, chosen: list[Choice], resources: Resources, cost: Cost) -> list[dict[str, Any]]:
    """Train once per choice, and once with everything; side by side as memory and the engine allow."""
    resources.check(2 * budget.replay_bytes(again.trajectory), "one training beside that with every example")
    left_out = rows_of(tuple(range(len(chosen))), [ids for _, ids in chosen])
    parts = list(left_out.chunks(resources.shard_size(budget.replay_bytes(again.trajectory), len(left_out))))
    prefix = "" if resources.work is None else again.identity()
    keys = [] if resources.work is None else [f"{prefix} {part.identity()}" for part in parts]
    shards = list(completed(resources, again, parts, keys, "training again"))
    cost.gradients += sum(shard.cost.gradients for shard in shards)
    measured = torch.cat([shard.tensors["measured"][:-1] for shard in shards] + [shards[0].tensors["measured"][-1:]])
    names = [*(name for name, _ in chosen), {"choice": NOTHING, "removed": 0, "draw": 0}]
    rows = [
        {**name, **dict(zip(MEASURED, row, strict=True))} for name, row in zip(names, measured.tolist(), strict=True)
    ]
    return rows[-1:] + rows[:-1]


def _mixed(seed: int, number: int) -> int:
    """Derive a seed for each of many numbers, different for different seeds."""
    return 1_000_003 * seed + number


def _measured(query: Query, stack: Params) -> Float[Tensor, "rows 6"]:
    """Compute mean loss and misclassification of every model of a stack, with standard errors over the test set.

    The last two columns are the standard errors of the differences from the last model, which saw every example.
    """
    losses, wrong = query.losses(stack).double(), _wrong(query, stack)
    wrong = torch.full_like(losses, float("nan")) if wrong is None else wrong
    means = [(values.mean(1), _standard_error(values)) for values in (losses, wrong)]
    changes = [_standard_error(values - values[-1:]) for values in (losses, wrong)]
    return torch.stack([*(column for pair in means for column in pair), *changes], dim=1)


def _standard_error(values: Float[Tensor, "rows examples"]) -> Float[Tensor, " rows"]:
    return values.std(1) / values.shape[1] ** 0.5


def _wrong(query: Query, stack: Params) -> Float[Tensor, "rows examples"] | None:
    """Mark with 1 where a model's class is not the example's; None if the outputs are not class scores."""
    rows = []
    for index in range(len(next(iter(stack.values())))):
        params = {name: tensor[index] for name, tensor in stack.items()}
        parts = [_misclassified(query.task, params, block) for block in query.blocks()]
        if any(part is None for part in parts):
            return None
        rows.append(torch.cat([part for part in parts if part is not None]).double())
    return torch.stack(rows)


def _misclassified(task: Task, params: Params, block: Batch) -> Tensor | None:
    with torch.no_grad():
        outputs, targets = task.objective.outputs(params, block)
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return None
    if isinstance(task.loss, nn.BCEWithLogitsLoss) and outputs.numel() == len(outputs) == targets.numel():
        return (outputs.flatten() > 0) != (targets.flatten() > 0.5)
    if outputs.ndim == 2 and outputs.shape[1] > 1 and targets.ndim == 1 and not targets.is_floating_point():
        return outputs.argmax(1) != targets
    return None
