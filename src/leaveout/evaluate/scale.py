"""What a planned run needs: operations counted on tensors without memory, times how often they are done.

Counting runs the same derivatives as scoring, on PyTorch's meta device, where tensors have shapes but no values:
neither the data nor the memory for it is needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from leaveout._util.trees import Params, pullback
from leaveout.compute.resources import VECTORS, shard_rows
from leaveout.errors import InputError

EFFICIENCY = 0.5
"""The fraction of a large matrix product's rate that sweeps reach: 0.4 to 0.75 in docs/benchmarks.md."""


@dataclass(frozen=True)
class Described:
    """A model by its shape, with one example; all of it may be on the meta device.

    Args:
        model: of any size.
        inputs: a batch of one example.
        targets: its targets.
        loss: ``(outputs, targets) -> mean loss``.
        layers: name patterns of the parameters that are scored.
        slots: the number of tensors in the optimizer state per parameter, including the parameter itself.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    layers: tuple[str, ...] = ("*",)
    slots: int = 1


@dataclass(frozen=True)
class Size:
    """The cost of one example of a problem: bytes, and floating point operations.

    ``vector`` is the size of a displacement of the scored parameters with the optimizer's ``slots``, ``state`` what a
    step writes to disk, ``activations`` what a forward pass keeps for its backward pass. ``training`` is the gradient
    of all trained parameters; the others are for the scored ones: ``reading`` gives ⟨v, g⟩, ``product`` H·v, ``more``
    H·v for each of many vectors, which share a pass, ``pair`` g and H·v of the example alone, and ``forward`` its loss.
    """

    slots: int
    vector: int
    state: int
    activations: int
    training: int
    reading: int
    product: int
    more: int
    pair: int
    forward: int


@dataclass(frozen=True)
class Planned:
    """A planned run and its scoring: query vectors, the width of sketches, and workers; ``disk`` as for a Recorder."""

    examples: int
    epochs: int
    batch_size: int
    queries: int = 1
    sketch: int = 256
    workers: int = 1
    disk: int = 2 * 10**9

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if value < 1:
                raise InputError(f"{name}={value} describes no run: give at least 1.", code="planned-run-impossible")

    @property
    def steps(self) -> int:
        """The number of steps of all epochs."""
        return self.epochs * -(-self.examples // self.batch_size)


def size_of(description: Described) -> Size:
    """Count what one example costs, by running the operations."""
    model, loss = description.model, description.loss
    trained = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
    scored = {name: param for name, param in trained.items() if any(fnmatchcase(name, p) for p in description.layers)}
    if not scored:
        raise InputError(
            f"layers={description.layers} names no trained parameter: there are {', '.join(trained)}.",
            code="layers-match-nothing",
        )

    def value(params: Params) -> Tensor:
        outputs = functional_call(model, {**trained, **params}, (description.inputs,))
        return loss(outputs, description.targets)

    _, pull = pullback(lambda p: grad(value)(p), scored)
    return Size(
        description.slots,
        description.slots * _bytes(scored),
        description.slots * _bytes(trained),
        _activation_bytes(model, lambda: loss(model(description.inputs), description.targets)),
        _counted(lambda: grad(value)(trained)),
        _counted(lambda: jvp(value, (scored,), (scored,))),
        _counted(lambda: grad(lambda p: jvp(value, (p,), (scored,))[1])(scored)),
        _counted(lambda: pull(scored)),
        _counted(lambda: jvp(grad(value), (scored,), (scored,))),
        _counted(lambda: value(scored)),
    )


def needs(size: Size, planned: Planned, rate: float, memory: int) -> pd.DataFrame:
    """Predict seconds, memory and disk of training and of every method.

    Args:
        size: what an example costs.
        planned: the run.
        rate: floating point operations per second that a worker sustains.
        memory: bytes that a worker has.
    """
    n, q = planned.examples, planned.queries
    visits = planned.epochs * n  # examples in all batches together
    states = min(planned.steps, planned.disk // size.state + math.isqrt(planned.steps))
    again = 0 if states == planned.steps else visits * size.training  # states that were not kept are recomputed
    batch = planned.batch_size * size.activations
    one = 4 * batch + 4 * size.vector
    pairs = 4 * batch + 4 * planned.batch_size * size.vector  # a gradient and a product per example of a batch
    rows, sketches = n * size.vector, n * planned.sketch * 4 * size.slots
    spilt = rows > memory
    exact, replay = shard_rows(6 * size.vector), shard_rows(3 * batch + 4 * size.state)
    of_exact, of_replay, of_queries = -(-n // exact), -(-n // replay), -(-q // VECTORS)
    base = size.pair - size.more  # the gradient, which a shard needs once
    sweep = size.product if q == 1 else q * size.more + of_queries * base
    both = size.pair if q == 1 else size.pair + sweep
    row = size.pair - size.forward  # for exact ACC: rows share the forward pass
    table = [
        ("training, recorded", visits * size.training, 2 * size.state + batch, (states + 1) * size.state, 1),
        ("TracIn", visits * size.reading + again, one, 0, 1),
        ("SGD-IE", visits * sweep + again, one + 2 * (q - 1) * size.vector, 0, of_queries),
        ("ACC(free)", visits * both + again, pairs + (0 if spilt else rows), rows if spilt else 0, of_queries),
        (f"ACC(sketch={planned.sketch})", q * (visits * size.pair + again), pairs + sketches, 0, q),
        ("ACC(exact)", visits * (n * row + of_exact * base), 4 * batch + exact * 6 * size.vector, 0, of_exact),
        # A shard has one more model, trained on every example.
        ("Replay", visits * (n + of_replay) * size.training, replay * (3 * batch + 4 * size.state), 0, of_replay),
    ]
    frame = pd.DataFrame(table, columns=["method", "work", "memory", "disk", "shards"]).set_index("method")
    # The last round of shards may leave workers idle.
    rounds = -(-frame["shards"] // planned.workers) / frame["shards"]
    return frame.assign(seconds=frame["work"] * rounds / rate)


def measured_rate() -> float:
    """Measure the operations per second that sweeps may reach here: a fraction of those of a large matrix product."""
    left = torch.randn(1024, 1024)
    left @ left
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        left @ left
        best = min(best, time.perf_counter() - start)
    return EFFICIENCY * 2 * 1024**3 / best


def _counted(function: Callable[[], object]) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def _activation_bytes(model: nn.Module, function: Callable[[], object]) -> int:
    shared = {param.untyped_storage()._cdata for param in model.parameters()}
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in shared:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function()
    return sum(storages.values())


def _bytes(params: Params) -> int:
    return sum(param.numel() * param.element_size() for param in params.values())
