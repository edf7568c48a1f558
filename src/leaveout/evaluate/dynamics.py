"""Training dynamics: how a recorded run treated each training example, by forward passes at its kept states."""

from __future__ import annotations

import math
import time
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from leaveout._util.equality import Comparable
from leaveout._util.trees import PARAM, Params, each
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, LeaveoutWarning, UnsupportedError, check_seed, is_whole
from leaveout.run.model_match import warn_of_other_weights
from leaveout.run.reader import Run
from leaveout.task import batches
from leaveout.task.batches import Batch
from leaveout.task.classes import IGNORED, Reading, class_logits, label_numbers, labelled, own_probability, readings
from leaveout.task.classes import margins as margins_of
from leaveout.task.task import Task
from leaveout.trajectory.left_out import leave_out
from leaveout.trajectory.replay import replayed_states
from leaveout.trajectory.trajectory import Trajectory

STATES = 20
"""The default number of states to evaluate."""
BLOCK = 256
"""Examples per forward pass; larger blocks of images are slower."""
EARLY = 2
"""The number of states evaluated before the first of the evenly spaced ones."""
MEMORISED = 0.05
"""A run that mispredicts less than this share of its labels may have memorised them."""
SHARPNESS = 16
"""A state's weight as a judge is the share of labels that it predicts, to this power."""
FEW = 10
"""How many examples without a label are named."""
PROBES = (4, 16, 64)
"""Steps after which it is checked whether a training stays within its budget."""


class TooLongError(Exception):
    """Training again would take longer than its budget: this many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"{seconds:.0f} s")
        self.seconds = seconds


@dataclass(frozen=True, eq=False)
class Dynamics(Comparable):
    """How a run treated its training examples: one row per evaluated state, one column per example.

    ``steps`` are the states' indices and ``epochs`` the epochs that they end or lie in; ``margins`` are the given
    label's logit minus the best other one, ``probabilities`` those of the given label. ``opinions`` has for each
    example the predicted distribution over the classes, averaged over the states, ``final`` that of the last state.
    With ``folds`` the states are those of that many trainings, and each example is judged by the one without it.
    """

    steps: tuple[int, ...]
    epochs: tuple[int, ...]
    labels: Int[Tensor, " n"]
    margins: Float[Tensor, "states n"]
    losses: Float[Tensor, "states n"]
    probabilities: Float[Tensor, "states n"]
    predicted: Int[Tensor, "states n"]
    opinions: Float[Tensor, "n classes"]
    final: Float[Tensor, "n classes"]
    folds: int | None = None

    @cached_property
    def weights(self) -> Float[Tensor, " states"]:
        """Each state's weight as a judge, in total 1: proportional to the 16th power of its share of predicted labels.

        A state that has learned little says little. If the run may have memorised its labels, all states have the
        same weight: those that predict most have memorised most.
        """
        memorised = self.folds is None and self.misfit < MEMORISED
        shares = self.fitted.double().mean(1) ** (0 if memorised else SHARPNESS)
        total = shares.sum()
        return (shares / total if total > 0 else torch.full_like(shares, 1 / len(shares))).to(self.margins.dtype)

    @cached_property
    def confidence(self) -> Float[Tensor, " n"]:
        """exp(½ Σ_t w_t (log p_t + log σ(margin_t))): how sure the states are of the given label, from 0 to 1.

        p is its probability among all classes, σ(margin) its share against the best other one: the first is the better
        judge if many classes compete, the second if the model is still unsure of all.
        """
        sure = self.probabilities.clamp_min(torch.finfo(self.probabilities.dtype).tiny).log()
        return (self.weights @ (sure + logsigmoid(self.margins)) / 2).exp()

    @cached_property
    def margin(self) -> Float[Tensor, " n"]:
        """The margin averaged over the states (area under the margin)."""
        return self.margins.mean(0)

    @cached_property
    def loss(self) -> Float[Tensor, " n"]:
        """The loss averaged over the states."""
        return self.losses.mean(0)

    @cached_property
    def probability(self) -> Float[Tensor, " n"]:
        """The probability of the given label averaged over the states."""
        return self.probabilities.mean(0)

    @cached_property
    def variability(self) -> Float[Tensor, " n"]:
        """The standard deviation of the given label's probability over the states."""
        return self.probabilities.std(0, correction=0)

    @cached_property
    def fitted(self) -> Tensor:
        """Whether each state predicts the given label."""
        return self.predicted == self.labels

    @cached_property
    def forgotten(self) -> Int[Tensor, " n"]:
        """How often the given label was predicted at one state and no longer at the next."""
        return (self.fitted[:-1] & ~self.fitted[1:]).sum(0)

    @cached_property
    def learned(self) -> Int[Tensor, " n"]:
        """The position of the state from which on the label is always predicted; the number of states if never."""
        place = torch.arange(1, len(self.steps) + 1, device=self.fitted.device)[:, None]
        return torch.where(self.fitted, 0, place).amax(0)

    @property
    def misfit(self) -> float:
        """The share of the examples whose label the last state does not predict."""
        return 1 - float(self.fitted[-1].double().mean())


def dynamics(
    run: Run,
    task: Task,
    *,
    states: int = STATES,
    folds: int | None = None,
    seed: int = 0,
    budget: float = math.inf,
    resources: Resources | None = None,
) -> Dynamics:
    """Evaluate every training example at some states of the run, before and after it may have been memorised.

    Args:
        run: the recorded run.
        task: what was trained, a classifier.
        states: how many kept states to evaluate: evenly spaced ones up to the last, and two early ones.
        folds: train the run again this often, each time without another part of the examples, and judge each
            example by the training that did not see it.
        seed: for the split into folds.
        budget: seconds of processor time that training again may take, as predicted from its first steps.
        resources: memory budget and progress.

    Raises:
        TooLongError: if training again would take longer than the budget.
    """
    if not is_whole(states, 1):
        raise InputError(f"states={states!r} must be a whole number of at least 1.", code="states-not-a-count")
    if folds is not None and not is_whole(folds, 2, task.size):
        raise InputError(
            f"folds={folds!r} must be a whole number from 2 to the number of examples, or None.",
            code="folds-not-a-count",
        )
    resources = resources or Resources()
    trajectory = Trajectory(run, task)
    if folds is None:
        trajectory.check_steps()  # a replay checks all of them
    warn_of_other_weights(run, task.parameters(), trajectory.final_whole()[PARAM])
    steps = chosen_states(range(len(run) + 1) if folds else run.kept, states)
    tables = _Collected(task, len(steps))
    if folds is None:
        _recorded(tables, run, task, steps, resources)
    else:
        _replayed(tables, trajectory, steps, parts(task.size, folds, seed), budget, resources)
    seen = tables.result(tuple(steps), tuple(run.record(step - 1).epoch for step in steps))
    return replace(seen, folds=folds)


def chosen_states(states: Sequence[int], count: int) -> list[int]:
    """Choose evenly spaced states up to the last, and two early ones, from those that are kept.

    >>> chosen_states(range(61), 8), chosen_states([0, 10, 20], 8)
    ([3, 7, 10, 20, 30, 40, 50, 60], [10, 20])
    """
    early = EARLY if count > 2 * EARLY else 0
    even = count - early
    shares = [(place + 1) / even for place in range(even)]
    shares += [(place + 1) / (early + 1) / even for place in range(early)]
    return sorted({_nearest(states, share * states[-1]) for share in shares})


def _nearest(states: Sequence[int], step: float) -> int:
    """Return the kept state nearest to a step, never the initial one."""
    place = max(1, bisect_left(states, step))
    return min(states[max(1, place - 1)], states[place], key=lambda state: abs(state - step))


def parts(size: int, folds: int, seed: int) -> list[list[int]]:
    """Split the examples at random into folds of equal size, up to one example.

    >>> [len(part) for part in parts(7, 2, 0)]
    [4, 3]
    """
    order = torch.randperm(size, generator=torch.Generator().manual_seed(check_seed(seed)))
    return [order[first::folds].sort().values.tolist() for first in range(folds)]


class _Collected:
    """The results of the forward passes so far: a few numbers per state and example, one distribution per example."""

    def __init__(self, task: Task, states: int) -> None:
        self.task = task
        self.reading: Reading | None = None
        self.labels = torch.zeros(task.size, dtype=torch.long)
        self.numbers = torch.zeros(3, states, task.size)
        self.predicted = torch.zeros(states, task.size, dtype=torch.long)
        self.sums = self.final = torch.zeros(0)
        self.unlabelled: set[int] = set()

    def add(self, place: int, params: Params, ids: Sequence[int], batch: Batch) -> None:
        """Evaluate some examples at one state."""
        with torch.no_grad():
            outputs, targets = self.task.objective.outputs(params, batch)
            losses = self.task.objective.output_losses(outputs, targets)
        targets, ignored = labelled(outputs, targets)
        if ignored is not None:
            self.unlabelled |= {number for number, without in zip(ids, ignored.tolist(), strict=True) if without}
        allowed = readings(outputs, targets, losses)
        if not allowed or (self.reading is not None and self.reading not in allowed):
            raise UnsupportedError(_refusal(outputs, targets), code="labels-not-classes")
        if self.reading is None:
            self.reading = next(reading for reading in Reading if reading in allowed)
        logits, labels = class_logits(self.reading, outputs).cpu(), label_numbers(targets).cpu()
        chances, index = logits.softmax(1).to(self.numbers.dtype), torch.as_tensor(ids)
        if not len(self.sums):
            self.sums, self.final = torch.zeros(2, self.task.size, chances.shape[1])
        self.labels[index] = labels
        for kind, values in enumerate((margins_of(logits, labels), losses.cpu(), own_probability(logits, labels))):
            self.numbers[kind, place, index] = values.to(self.numbers.dtype)
        self.predicted[place, index] = logits.argmax(1)
        self.sums[index] += chances
        if place == len(self.predicted) - 1:
            self.final[index] = chances

    def result(self, steps: tuple[int, ...], epochs: tuple[int, ...]) -> Dynamics:
        """Return the tables."""
        margins, losses, probabilities = self.numbers
        if self.unlabelled:
            few = ", ".join(map(str, sorted(self.unlabelled)[:FEW])) + (", ..." if len(self.unlabelled) > FEW else "")
            warnings.warn(
                f"{len(self.unlabelled)} examples have no label (target {IGNORED}) and are left out of the search: "
                f"{few}.",
                LeaveoutWarning,
                stacklevel=3,
            )
        opinions = self.sums / len(steps)
        return Dynamics(
            steps, epochs, self.labels, margins, losses, probabilities, self.predicted, opinions, self.final
        )


def _recorded(tables: _Collected, run: Run, task: Task, steps: list[int], resources: Resources) -> None:
    """Evaluate the recorded states on as many examples at a time as memory allows, so that each is read once."""
    example = task.read([0])
    bytes_each = 2 * sum(leaf.numel() * leaf.element_size() for leaf in batches.leaves(example) if _is_tensor(leaf))
    size = resources.chunk(bytes_each, task.size)
    chunks = [range(first, min(first + size, task.size)) for first in range(0, task.size, size)]
    work = ((chunk, place) for chunk in chunks for place in range(len(steps)))
    blocks: list[tuple[Sequence[int], Batch]] = []
    for chunk, place in resources.track(work, len(chunks) * len(steps), "looking through states"):
        if place == 0:
            blocks = [(ids, task.read(ids)) for ids in _blocks(chunk)]
        params = each(lambda tensor: tensor.to(task.device), run.state(steps[place])[PARAM])
        for ids, batch in blocks:
            tables.add(place, params, ids, batch)


def _replayed(
    tables: _Collected,
    trajectory: Trajectory,
    steps: list[int],
    folds: list[list[int]],
    budget: float,
    resources: Resources,
) -> None:
    """Evaluate each example by the training that leaves its fold out."""
    task, place_of = trajectory.task, {step: place for place, step in enumerate(steps)}
    left_out = leave_out(task.size, groups=folds)
    clock = _Clock(len(trajectory), budget)
    for recorded, stack in replayed_states(trajectory, left_out, 0.0, resources, Cost()):
        clock.tick(recorded.record.index)
        place = place_of.get(recorded.record.index + 1)
        if place is None:
            continue
        for number, fold in enumerate(folds):
            params = {name: tensor[number] for name, tensor in stack.items()}
            for ids in _blocks(fold):
                tables.add(place, params, ids, task.read(ids))


class _Clock:
    """Predicts from the first steps how long a training takes; one-time work is done in the very first step."""

    def __init__(self, steps: int, budget: float) -> None:
        self._steps, self._budget, self._start = steps, budget, 0.0

    def tick(self, step: int) -> None:
        """Note that a step is done; raise TooLongError if all steps would take longer than the budget."""
        if step == 0:
            self._start = time.process_time()
        elif step in PROBES:
            seconds = (time.process_time() - self._start) / step * self._steps
            if seconds > self._budget:
                raise TooLongError(seconds)


def _blocks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(ids), BLOCK):
        yield ids[first : first + BLOCK]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _refusal(outputs: Any, targets: Any) -> str:
    kind = (
        f"{str(targets.dtype).removeprefix('torch.')} of shape {list(targets.shape)}"
        if isinstance(targets, Tensor)
        else f"of type {type(targets).__name__}"
    )
    shape = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"type {type(outputs).__name__}"
    return (
        "Labels can be checked where targets are class numbers and the model gives a row of logits, or where they are "
        "0 and 1 and the model gives one logit or probability and the loss is its cross-entropy; here outputs have "
        f"{shape} and targets are {kind}: give Task a forward= that returns logits, if the loss takes them, or leave "
        "labels alone."
    )
