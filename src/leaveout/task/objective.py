"""What a run minimised, as pure functions of parameters: a frozen value, and constructors of values derived from it.

The loss of a batch Z is ``(1/|Z|) Σ_{z∈Z} w_z ℓ(z, θ)`` with ``ℓ(z, θ) = loss(model(x), y) + (l2/2)‖θ‖²``. Query losses
have no L2 term, and their mean no class weights or counts.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import grad

from leaveout._util.trees import Params, sum_of
from leaveout._util.wrappers import bare
from leaveout.diff.forms import Abilities
from leaveout.errors import InputError, UnsupportedError
from leaveout.optim.clip import Clip
from leaveout.optim.rule import Penalty
from leaveout.task import batches
from leaveout.task.batches import Batch, Each
from leaveout.task.draws import Draws, replay
from leaveout.task.example_draws import Axes, together
from leaveout.task.execution import Chunks, Execution
from leaveout.task.forward import Called, Forward, default_forward, uncast
from leaveout.task.losses import Loss, LossParts, as_module, taken_apart
from leaveout.task.measures import FLAT, Measure, measure_of
from leaveout.task.rewrites.batch_norm import weighted_batch_norm
from leaveout.task.rewrites.folding import Folded
from leaveout.task.rewrites.kinks import kinked
from leaveout.task.rewrites.missing_rules import Unstopped
from leaveout.task.training_batch import TrainingBatch, Window, parts_of, size_of


@dataclass(frozen=True)
class Mode:
    """How the model is called in a step.

    Attributes:
        training: the modules in training mode.
        buffers: the model's buffers that training changes.
        autocast: the dtype of mixed precision, if any.
        loss_scale: the scale of a float16 loss.
        kinks: whether kinks have curvature in second derivatives.
    """

    training: frozenset[str] = frozenset()
    buffers: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    loss_scale: float = 1.0
    kinks: bool = False


@dataclass(frozen=True)
class Objective:
    """A model, its loss, and how steps were made of them.

    Attributes:
        called: the model with its forward rule.
        parts: the loss as a number and a count per example.
        names: the trained parameters.
        chosen: those in which derivatives are taken.
        l2: strength of the per-example L2 term over all trained parameters.
        clip: how the gradient was clipped.
        penalty: what was added to the loss of each step, and belongs to no example.
        statistics: whether a left-out example leaves BatchNorm's statistics, too.
        accumulation: how the losses of several micro-batches were added up.
        counted: whether examples count differently in the loss of a batch.
        mode: how the model is called.
        loss: the loss as it was given.
        measure: what is computed for each query.
        execution: how derivatives are computed.
    """

    called: Called
    parts: LossParts
    names: tuple[str, ...]
    chosen: tuple[str, ...]
    l2: float = 0.0
    clip: Clip | None = None
    penalty: Penalty | None = None
    statistics: str = "leave"
    accumulation: str | int = "mean"
    counted: bool = False
    mode: Mode = Mode()
    loss: Any = field(default=None, compare=False)
    measure: Measure = field(default="loss", compare=False)
    execution: Execution = field(default_factory=Execution, compare=False)

    # --- Derived objectives

    def by(self, execution: Execution) -> Objective:
        """Return the same, computed another way."""
        return replace(self, execution=execution)

    def chunked(self, chunks: Chunks) -> Objective:
        """Return the same, so much of which is computed at a time."""
        return self.by(replace(self.execution, chunks=chunks))

    def able(self, abilities: Abilities) -> Objective:
        """Return the same with these forms of derivatives."""
        return self._with(replace(self.execution, abilities=abilities))

    def untraced(self) -> Objective:
        """Return the same without traces."""
        return self.by(self.execution.untraced())

    def anew(self) -> Objective:
        """Return the same with nothing traced or found out yet."""
        return self._with(replace(self.execution, memory=self.execution.memory.fresh()))

    def training_only(self, names: Collection[str]) -> Objective:
        """Return the same for a run that trained these parameters; some may be frozen by now."""
        trained = tuple(name for name, _ in self.model.named_parameters() if name in names)
        if trained == self.names or not set(self.names) <= set(trained):
            return self
        return self._with(names=trained, chosen=trained)

    def restricted(self, layers: str | Sequence[str] | None) -> Objective:
        """Return the same with derivatives for chosen parameters only: names or patterns such as ``"head.*"``."""
        return self if layers is None else self._with(chosen=matching(self.names, layers))

    def in_mode(self, **changes: Any) -> Objective:
        """Return the same with some fields of its mode changed."""
        mode = replace(self.mode, **changes)
        return self if mode == self.mode else self._with(mode=mode)

    def measuring(self, measure: Measure) -> Objective:
        """Return the same with another measure for its queries."""
        measure_of(measure, self.loss)
        return replace(self, measure=measure)

    def counting(self, parts: LossParts) -> Objective:
        """Return the same with other losses of single examples."""
        return self._with(parts=parts)

    def to_dtype(self, dtype: torch.dtype) -> Objective:
        """Return the same with a copy of the model in another dtype; batches are converted when they are used."""
        model = _to_dtype(self.model, dtype)
        loss = _to_dtype(self.loss, dtype) if isinstance(self.loss, nn.Module) else self.loss
        called, memory = self.called.converted(model, dtype), self.execution.memory.beside()
        execution = replace(self.execution, memory=memory)
        return self._with(execution, called=called, loss=loss, parts=taken_apart(loss))

    def to_float64(self) -> Objective:
        """Return the same in float64, without traces; not copied if it is in float64."""
        return self.untraced() if self.is_wide else self.to_dtype(torch.float64).untraced()

    def at_least_single(self) -> Objective:
        """Return the same in float32 if parameters have 16 bits, too few for differences of losses."""
        narrow = {torch.float16, torch.bfloat16} & {param.dtype for param in self.model.parameters()}
        return self.to_dtype(torch.float32) if narrow else self

    def _with(self, execution: Execution | None = None, **changes: Any) -> Objective:
        """Return the same with some fields changed, and with the tracer of what it then computes."""
        other, execution = replace(self, **changes), execution or self.execution
        tracer = execution.memory.tracer((other, execution.abilities))
        return replace(other, execution=replace(execution, tracer=tracer))

    # --- What it is

    @cached_property
    def model(self) -> nn.Module:
        """The model."""
        return self.called.model

    @cached_property
    def _first(self) -> Tensor | None:
        return next(self.model.parameters(), None)  # needed often, and searching modules is slow

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return torch.device("cpu") if self._first is None else self._first.device

    @property
    def is_wide(self) -> bool:
        """Whether it computes in float64."""
        return self._first is not None and self._first.dtype == torch.float64

    @cached_property
    def coupled(self) -> bool:
        """Whether a training batch's examples depend on each other, or training changes buffers: BatchNorm."""
        trained = (module for name, module in self.called.named if name in self.mode.training)
        return bool(self.mode.buffers) or any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in trained)

    @property
    def abilities(self) -> Abilities:
        """The forms of derivatives that are correct."""
        return self.execution.abilities

    def parameters(self) -> Params:
        """Return the model's current trained parameters."""
        return {name: param for name, param in self.model.named_parameters() if name in self.names}

    def variables(self, params: Params) -> Params:
        """Return the parameters in which derivatives are taken, and the buffers that training changes."""
        return {name: params[name] for name in (*self.chosen, *self.mode.buffers)}

    def axes(self, draws: Draws) -> Axes | None:
        """Return which dimension of each draw indexes examples, as it was found; None if they cannot be split."""
        return self.execution.memory.known(self.axes_question(draws))

    def axes_question(self, draws: Draws) -> tuple:
        """Return the question to which ``axes`` is the answer."""
        return ("axes", self.mode.training, self.mode.buffers, *draws)

    # --- What it computes

    def outputs(self, params: Params, batch: Batch) -> tuple[Tensor, Any]:
        """Return the model's outputs and the targets they are compared with."""
        if isinstance(batch, TrainingBatch):
            return self._trained(params, batch)[0]
        # A running statistic has a derivative only if BatchNorm is written out.
        held = {name: value for name, value in params.items() if name in self.called.buffer_names}
        with weighted_batch_norm(None, held) if held else nullcontext():
            return self._pure(params, batch, frozenset())[0]

    def _pure(self, *args: Any) -> tuple[tuple[Tensor, Any], Params]:
        return kinked(self.called, *args) if self.mode.kinks else self.called.pure(*args)

    def _trained(
        self, params: Params, batch: TrainingBatch, weights: Tensor | None = None
    ) -> tuple[tuple[Tensor, Any], Params]:
        """Return outputs and targets of a batch as training saw it, and the buffers after it."""
        draws = together(batch.draws, self.axes(batch.draws) or {}) if batch.draws else batch.whole
        # Cloned, for models that write to them.
        held = {name: params[name].clone() for name in self.mode.buffers}
        leaving = weights if self.statistics == "leave" else None
        nothing: AbstractContextManager[Params] = nullcontext({})
        with weighted_batch_norm(leaving, held) if self.coupled else nothing as new, self._casting():
            within = replay(draws) if draws else None
            both, after = self._pure({**params, **held}, batch.batch, self.mode.training, within)
        return both, {name: new.get(name, after[name]) for name in self.mode.buffers}

    def _casting(self) -> AbstractContextManager:
        """Return a context that autocasts operations as in training; for values, not for higher-order derivatives."""
        if self.mode.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.mode.autocast, cache_enabled=False)

    def live_losses(self, batch: Batch) -> Each:
        """Return losses of a batch under the current model, in its modes, whose mean is the training loss."""
        training = frozenset(name for name, module in self.called.named if module.training)
        (outputs, targets), _ = self.called.pure({}, batch, training)
        losses = self.parts.losses(outputs, targets)
        counts = self.parts.counts(outputs, targets) if self.counted and self.parts.counts else None
        if counts is not None:
            losses = losses * counts * (len(counts) if self.parts.summed else len(counts) / counts.sum())
        losses = losses + self._decay(self.parameters()) if self.l2 else losses
        return losses if self.penalty is None else losses + self.penalty(self.parameters())

    def output_losses(self, outputs: Tensor, targets: Any) -> Each:
        """Return per-example losses of given outputs, without the L2 term."""
        return self.parts.losses(outputs, targets)

    def query_losses(self, params: Params, batch: Batch) -> Each:
        """Return per-example losses, without the L2 term."""
        return self.parts.losses(*self.outputs(params, batch))

    def output_measures(self, outputs: Tensor, targets: Any) -> Each:
        """Return the per-example measure of given outputs; by default the loss."""
        return (measure_of(self.measure, self.loss) or self.parts.losses)(outputs, targets)

    def measures(self, params: Params, batch: Batch) -> Each:
        """Return the per-example measure; by default the loss."""
        return self.output_measures(*self.outputs(params, batch))

    def losses(self, params: Params, batch: Batch) -> Each:
        """Compute ℓ(z, θ) for each example z of the batch; for a training batch, times its scale."""
        parts, current = [], params
        for part in parts_of(batch):
            losses, moved = self._part_losses(current, part)
            parts.append(losses)
            current = {**current, **moved}
        losses = torch.cat(parts) if len(parts) > 1 else parts[0]
        return losses + self._decay(params) if self.l2 else losses

    def _part_losses(self, params: Params, part: Batch, weights: Tensor | None = None) -> tuple[Tensor, Params]:
        """Return scaled losses of one micro-batch without the L2 term, and the buffers after it."""
        if not isinstance(part, TrainingBatch):
            return self.query_losses(params, part), {name: params[name] for name in self.mode.buffers}
        both, moved = self._trained(params, part, weights)
        with self._casting():
            losses = self.parts.losses(*both)
        return (losses * part.scale if isinstance(part.scale, Tensor) else losses), moved

    def _decay(self, params: Params) -> Tensor:
        return 0.5 * self.l2 * sum_of(params[name].square().sum() for name in self.names)

    def value(self, params: Params, weights: Each, batch: Batch, *, alone: bool = False) -> tuple[Tensor, Params]:
        """Compute (1/|Z|) Σ w_z ℓ(z, θ), and the buffers after the step's forward passes.

        Leaving an example out sets its weight to zero; the denominator stays. ``alone``: no stack of models or vectors.
        """
        total, start = None, 0
        moved: Params = {}
        for part in parts_of(batch):
            part_weights = weights[start : start + size_of(part)] if isinstance(batch, Window) else weights
            with nullcontext() if alone or self.mode.autocast else Folded():  # a rearranged product rounds differently
                losses, moved = self._part_losses({**params, **moved}, part, part_weights)
                losses = losses + self._decay(params) if self.l2 else losses
            term = (part_weights * losses).sum()
            total = term if total is None else total + term
            start += len(part_weights)
        assert total is not None  # noqa: S101 - a window has a micro-batch
        return total / len(weights), moved

    def gradient(self, params: Params, weights: Each, batch: Batch, *, alone: bool = False) -> Params:
        """Compute ḡ(θ; w), the gradient of the weighted batch loss; for a buffer, its new value instead."""
        scale = self.mode.loss_scale

        def scaled(chosen: Params) -> tuple[Tensor, Params]:
            loss, moved = self.value({**params, **chosen}, weights, batch, alone=alone)
            return (loss if scale == 1 else loss * scale), moved

        value, moved = grad(scaled, has_aux=True)({name: params[name] for name in self.chosen})
        if scale != 1:
            value = {name: tensor / scale for name, tensor in value.items()}
        return {**value, **moved}

    def example_loss(self, params: Params, example: Batch) -> Float[Tensor, ""]:
        """Compute ℓ(z, θ) of one example, without a batch dimension."""
        return self.losses(params, batches.map_leaves(lambda leaf: leaf.unsqueeze(0), example))[0]

    def unstopped(self) -> AbstractContextManager:
        """Return a context in which derivatives ignore stop-gradients, unlike in training."""
        if self.measure in FLAT:
            raise UnsupportedError(
                f"measure={self.measure!r} has no derivative, which scores are made of: use Replay(), or another "
                "measure, such as 'margin'.",
                code="measure-without-derivative",
            )
        if not self.abilities.slope:
            raise UnsupportedError(
                "The gradient of this task's loss is not the loss's derivative, which scores are made of: "
                f"{self.abilities.reason}. Use Replay().",
                code="gradient-not-a-derivative",
            )
        return Unstopped() if self.abilities.stops else nullcontext()


def matching(names: Sequence[str], layers: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names that match the patterns of ``layers=``; refuse a pattern that matches none.

    >>> matching(("body.weight", "head.weight", "head.bias"), "head.*")
    ('head.weight', 'head.bias')
    """
    patterns = [layers] if isinstance(layers, str) else list(layers)
    unknown = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if unknown or not patterns:
        raise InputError(
            f"layers={layers!r} names no trained parameter{f' by {unknown[0]!r}' if unknown else ''}: use names or "
            f"patterns such as 'head.*'; there are {', '.join(names)}.",
            code="layers-match-nothing",
        )
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def objective_of(
    model: nn.Module,
    loss: nn.Module | Loss,
    forward: Forward | None,
    execution: Execution,
    **fields: Any,
) -> Objective:
    """Return the objective of a model in its current modes, with nothing known of its derivatives yet."""
    model, loss = uncast(bare(model)), as_module(loss)
    names = tuple(name for name, param in model.named_parameters() if param.requires_grad)
    training = frozenset(name for name, module in model.named_modules() if module.training)
    called = Called(model, forward or default_forward)
    given = Objective(called, taken_apart(loss), names, names, mode=Mode(training), loss=loss, **fields)
    measure_of(given.measure, loss)
    return given._with(execution)


def _to_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(module)._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
