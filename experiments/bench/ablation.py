"""What each pass that only saves time is worth: with it and without, on four kinds of networks, in one run.

What a step of a sweep or a replay computes is measured alone: in a whole run, reading and checking steps is added to
both sides, and the ratio is closer to 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.bench.networks import slim_resnet, small_gpt
from experiments.bench.problems import QUIET, folder, images, quickest
from experiments.bench.table import Row
from experiments.bench.trainers import tiny_bert
from leaveout._util import blocks
from leaveout._util.trees import Params
from leaveout.diff import calls, hessian
from leaveout.diff.hessian import Hessian, pull_by_example
from leaveout.estimators import ACC, query
from leaveout.run.reader import Run
from leaveout.sweep import linear_step
from leaveout.task import objective as objectives
from leaveout.task.execution import Chunks
from leaveout.task.objective import Objective
from leaveout.task.task import Task
from leaveout.task.trace import layout, tracer
from leaveout.trajectory import stack
from leaveout.trajectory.trajectory import Trajectory

WORTH = 1.2
"""How many times as long it must take without a pass on one of the networks, or the pass is not worth its lines."""

ONE_MAKER = 1.5
"""The same for a pass that helps on one maker's processors only."""

ROUNDS = 5


def _nothing(*_: Any) -> None:
    return None


def _plain(*_: Any) -> AbstractContextManager[None]:
    return nullcontext()


ONEDNN = "oneDNN's products"
PASSES: dict[str, list[tuple[Any, str, Any]]] = {
    "layout of images": [(layout, "for_images", _nothing), (layout, "pool_by_channels", _nothing)],
    "traces in two stages": [(tracer.Tracer, "staged", _nothing)],
    ONEDNN: [(module, "fast_products", _plain) for module in (calls, stack, query)],
    "folded linear layers": [(module, "Folded", _plain) for module in (objectives, hessian, query)],
    "elementary operations of replays": [(stack, "Quicker", _plain)],
    "blocks of coordinates": [(linear_step, "blocks", lambda rows, *_: map(blocks.Block, rows))],
}
"""What stands in place of each pass's functions where the pass is left out."""


class Subject(NamedTuple):
    """A recorded run of two steps, and its task."""

    name: str
    task: Task
    run: Run


def subjects() -> Iterator[Subject]:
    """Train each of the networks."""
    _, own, run = images(128, 1)
    yield Subject("MNIST CNN", own, run)
    gpt = small_gpt(2, queries=2)
    yield Subject("GPT", gpt.task, gpt.run)
    resnet = slim_resnet(2, size=32)
    yield Subject("ResNet-18", resnet.task, resnet.run)
    bert = tiny_bert(16, folder())
    yield Subject("BERT", bert.task(), bert.run)


@contextmanager
def without(name: str) -> Iterator[None]:
    """Leave out a pass within this context."""
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in PASSES.get(name, [])]
    for owner, attribute, other in PASSES.get(name, []):
        setattr(owner, attribute, other)
    try:
        yield
    finally:
        for owner, attribute, own in before:
            setattr(owner, attribute, own)


class Often(Counter):
    """Counts calls as if there had been many before, so that each function is traced when it is first called."""

    def __missing__(self, key: object) -> int:
        return 10_000


def measured(subject: Subject) -> dict[str, dict[str, float]]:
    """Measure how many times as long each part of a step takes without each of the passes, traced before."""
    found: dict[str, dict[str, float]] = {name: {} for name in PASSES}
    for what, compute in _parts(subject).items():
        variants = [_variant(name, compute, subject) for name in ("", *PASSES)]
        for variant in variants:
            variant()
        plain, *others = quickest(ROUNDS, *variants)
        for name, other in zip(PASSES, others, strict=True):
            found[name][f"{what} ({plain * 1e3:.0f} ms)"] = other / plain
    return found


def _parts(subject: Subject) -> dict[str, Callable[[Objective], object]]:
    """Return what a step of SGD-IE, of ACC and of a replay computes, as functions of a task."""
    recorded = Trajectory(subject.run, subject.task).recorded_step(1)
    where = recorded.params, recorded.batch
    vector = {name: torch.randn_like(tensor) for name, tensor in recorded.objective.variables(recorded.params).items()}
    one = {name: tensor[None] for name, tensor in vector.items()}
    three = {name: torch.randn(3, *tensor.shape) for name, tensor in vector.items()}
    weights = torch.ones(len(recorded.record.ids))

    def each(own: Objective) -> object:
        chunks = Chunks(1, threads=torch.get_num_threads())
        return Hessian(own.chunked(chunks), *where).pull(three)

    def replayed(own: Objective) -> Params:
        gradient: Callable[..., Params] = partial(stack._gradient, own)
        given: tuple[Params, Tensor, Any] = (where[0], weights, where[1])
        return (own.execution.tracer.trace((1, 0), "one gradient", gradient, *given) or gradient)(*given)

    parts: dict[str, Callable[[Objective], object]] = {
        "product": lambda own: Hessian(own, *where).pull(one),
        "three products": each,
        "a replay's gradient": replayed,
    }
    if not recorded.objective.coupled:
        parts["product with gradients"] = lambda own: pull_by_example(own, *where, vector)
        parts["ACC"] = lambda own: ACC().score(
            subject.run, subject.task.of(own), subject.task.train_set, resources=QUIET
        )
    return parts


def _variant(name: str, compute: Callable[[Objective], object], subject: Subject) -> Callable[[], object]:
    """Return the same without a pass; traces are made without it too, so each has a task of its own."""
    own = Trajectory(subject.run, subject.task).recorded_step(1).objective.anew()
    own.execution.tracer._calls = Often()

    def call() -> object:
        with without(name):
            return compute(own)

    return call


def ablation() -> list[Row]:
    """Compare a step's parts with and without each pass that only saves time."""
    found = {subject.name: measured(subject) for subject in subjects()}
    return [row_of(name, {network: ratios[name] for network, ratios in found.items()}) for name in PASSES]


def row_of(name: str, ratios: dict[str, dict[str, float]]) -> Row:
    """Return a pass's row: the most that it brings on one of the networks, and what on each."""
    best = max(max(own.values()) for own in ratios.values())
    parts = (
        f"{network}: {', '.join(f'{what} {ratio:.2f}' for what, ratio in own.items())}"
        for network, own in ratios.items()
    )
    return Row(f"without / with {name}", best, ">=", ONE_MAKER if name == ONEDNN else WORTH, "; ".join(parts))
