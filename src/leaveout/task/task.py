"""Per-example losses, their gradients and Hessian-vector products, as pure functions of the parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import grad
from torch.utils.data import Dataset

from leaveout._util.trees import Params, sum_of
from leaveout._util.wrappers import bare
from leaveout.errors import UnsupportedError
from leaveout.optim.clip import clip_of
from leaveout.task import batches
from leaveout.task.batches import Batch, Collate, Each
from leaveout.task.batching import looped, side_by_side
from leaveout.task.checks import check_options, is_coupled, matching, refuse, trial_problems
from leaveout.task.draws import replay
from leaveout.task.dtypes import converted
from leaveout.task.example_draws import Axes, together
from leaveout.task.forward import Called, Forward, default_forward, uncast
from leaveout.task.guard.comparison import Comparison
from leaveout.task.guard.coupled import coupled_defaults
from leaveout.task.losses import Loss, as_module, call_name, taken_apart
from leaveout.task.measures import FLAT, Measure, measure_of
from leaveout.task.modules import module_problems
from leaveout.task.preparing import trial_batch
from leaveout.task.queries import Queries
from leaveout.task.rewrites.batch_norm import weighted_batch_norm
from leaveout.task.rewrites.folding import Folded
from leaveout.task.rewrites.kinks import kinked
from leaveout.task.rewrites.missing_rules import Unstopped
from leaveout.task.trace.tracer import Tracer
from leaveout.task.training_batch import TrainingBatch, Window, parts_of, size_of


class Task:
    """What was trained: a model, a per-example loss and the training set.

    The batch loss is ``(1/|Z|) Σ_{z∈Z} w_z ℓ(z, θ)`` with ``ℓ(z, θ) = loss(model(x), y) + (l2/2)‖θ‖²``: the L2 term
    belongs to each example and is left out with it. Query losses have no L2 term, and their mean no class weights or
    counts. Queries are evaluated in evaluation mode; training batches in the run's modes, with its random draws. Where
    data set or collator draw at random, as one that masks words does, queries are drawn once, from a fixed seed.

    Args:
        model: any ``nn.Module``; its frozen parameters are constants.
        loss: an ``nn`` loss module or its function, such as ``F.cross_entropy``; or a function of outputs and targets
            that returns one loss per example or, if the training loss is not their mean (but over unmasked tokens,
            say), ``(sums, counts)``: the training loss is Σ sums / Σ counts, and the denominator stays without one.
        train_set: a map-style data set; its positions are the examples' ids.
        l2: strength of the per-example L2 term over all trained parameters.
        forward: ``(model, batch) -> (outputs, targets)`` for batches that are neither ``(inputs..., targets)`` nor a
            dict of the model's keyword arguments plus one of ``labels, label, targets, target, y``.
        collate: the loader's ``collate_fn``, if it had one.
        clip_norm: the largest norm of the gradient, if it was clipped (``clip_grad_norm_``); ``(norm, p)`` for another
            norm than the Euclidean.
        clip_value: the largest absolute value of its entries, if it was clipped (``clip_grad_value_``).
        statistics: for BatchNorm in training mode: a left-out example also leaves the batch's statistics
            (``"leave"``), as if it had not been in the batch, or stays in them and only its loss is dropped
            (``"stay"``).
        accumulation: for a step on several micro-batches: ``"mean"`` if their losses were averaged, as by
            ``(loss / k).backward()``; ``"sum"`` if they were added; ``"window"`` if they were divided by the whole
            window's denominator; or a number k if they were divided by k, however many there were.
        measure: what is computed for each query, if not its loss: ``"margin"``, ``"log_prob"``, ``"correct"``, or a
            function ``(outputs, targets) -> one number per example``; ``task.measuring(...)`` changes it later.
        trace: repeat recurring computations from a trace of their operations, which is faster. Operations that cannot
            be traced are logged (``logging.getLogger("leaveout")``, level INFO) and computed without a trace.
        check: compare second derivatives, on the first examples, with finite differences of the gradient, now and at
            the scored state; a form that is wrong is not used. Takes less than a second for a small model.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | Loss,
        train_set: Dataset,
        l2: float = 0.0,
        *,
        forward: Forward | None = None,
        collate: Collate | None = None,
        clip_norm: float | tuple[float, float] | None = None,
        clip_value: float | None = None,
        statistics: str = "leave",
        accumulation: str | int = "mean",
        measure: Measure = "loss",
        trace: bool = True,
        check: bool = True,
    ) -> None:
        check_options(model, loss, train_set, l2, statistics, accumulation)
        self.clip = clip_of(clip_norm, clip_value)
        self.measure, self._measured = measure, measure_of(measure, loss)
        self.statistics, self.accumulation = statistics, accumulation
        self.model = model = uncast(bare(model))
        self.train_set, self.l2, self.collate, self.queries = train_set, l2, collate, Queries(collate)
        self._first = next(model.parameters(), None)  # needed often, and searching modules is slow
        self.names = tuple(name for name, param in model.named_parameters() if param.requires_grad)
        self.chosen = self.names
        self.check = check
        self._comparisons: dict[int, Comparison] = {}
        self.tracer = Tracer(any(isinstance(module, nn.Conv2d) for module in model.modules()), never=not trace)
        self.loss = as_module(loss)
        self.parts = taken_apart(self.loss)
        self.counted = self.random_data = False
        self.buffers: tuple[str, ...] = ()
        self.autocast: torch.dtype | None = None
        self.kinks, self.kink_sizes, self.loss_scale = False, dict[tuple[int, int], float | None](), 1.0
        self.training = frozenset(name for name, module in model.named_modules() if module.training)
        self.axes: dict[tuple[str, ...], Axes | None] = {}
        self._views: dict[Any, Task] = {}
        self._recorded_views: dict[tuple, dict[float, Task]] = {}
        self.called = Called(model, forward or default_forward)
        self.coupled = is_coupled(self.called, self.training, ())
        problems = module_problems(model)
        if not problems:
            # A trial on the first examples finds what the modules' types do not show.
            problems, self.abilities = trial_problems(self, check)
        refuse(problems)

    def __repr__(self) -> str:
        return f"Task({type(self.model).__name__}, {call_name(self.loss)}, {self.size} training examples)"

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return torch.device("cpu") if self._first is None else self._first.device

    @property
    def size(self) -> int:
        """The number of training examples."""
        return batches.size(self.train_set)

    def parameters(self) -> Params:
        """Return the model's current trained parameters."""
        return {name: param for name, param in self.model.named_parameters() if name in self.names}

    def training_of(self, names: Collection[str]) -> Task:
        """Return the same task for a run that trained these parameters; some may be frozen by now."""
        trained = tuple(name for name, _ in self.model.named_parameters() if name in names)
        if trained == self.names or not set(self.names) <= set(trained):
            return self
        if trained not in self._views:
            task = self.untraced()
            task.names = task.chosen = trained
            self._views[trained] = task
        return self._views[trained]

    def restricted(self, layers: str | Sequence[str] | None) -> Task:
        """Return the same task with derivatives for chosen parameters only: names or patterns such as ``"head.*"``."""
        if layers is None:
            return self
        task = self.untraced()
        task.chosen = matching(self.names, layers)
        return task

    def untraced(self) -> Task:
        """Return the same task with nothing traced or compared yet."""
        task = copy.copy(self)
        task.tracer, task._comparisons, task.kink_sizes = self.tracer.fresh(), {}, {}
        task._views, task._recorded_views = {}, {}
        return task

    def quiet(self) -> Task:
        """Return the same task without tracing."""
        task = copy.copy(self)
        task.tracer = Tracer(never=True)
        return task

    def widened(self) -> Task:
        """Return the same task in float64, as ``doubled``, but without tracing; not converted if it is in float64."""
        return self.quiet() if self.is_wide else converted(self.quiet(), torch.float64)

    @property
    def is_wide(self) -> bool:
        """Say whether it computes in float64."""
        return self._first is not None and self._first.dtype == torch.float64

    def comparison(self, key: int, params: Params, ids: Sequence[int]) -> Comparison:
        """Return which forms of derivatives are also correct on these examples at another state, named ``key``."""
        if key not in self._comparisons:
            self._comparisons[key] = Comparison(self, params, trial_batch(self, params, ids))
        return self._comparisons[key]

    def doubled(self) -> Task:
        """Return the same task computed in float64; the data set stays as it is, and batches are converted."""
        return converted(self.untraced(), torch.float64)

    def at_least_single(self) -> Task:
        """Return the same task computed in float32 if parameters have 16 bits, too few for differences of losses."""
        if not {torch.float16, torch.bfloat16} & {param.dtype for param in self.model.parameters()}:
            return self
        return converted(self.untraced(), torch.float32)

    def as_recorded(
        self,
        training: frozenset[str] | None,
        buffers: Sequence[str],
        autocast: torch.dtype | None,
        loss_scale: float = 1,
    ) -> Task:
        """Return the same task as a run trained it: modules in training mode, moving buffers, mixed precision."""
        mode = (self.training if training is None else training, tuple(buffers), autocast)
        if (*mode, loss_scale) == (self.training, self.buffers, self.autocast, self.loss_scale):
            return self
        by_scale = self._recorded_views.setdefault(mode, {})
        if loss_scale not in by_scale:
            task = self.untraced()
            task.training, task.buffers, task.autocast = mode
            task.loss_scale = loss_scale
            # Which draw belongs to which example does not depend on the scale.
            task.axes = next(iter(by_scale.values())).axes if by_scale else {}
            task.coupled = is_coupled(self.called, task.training, task.buffers)
            if task.coupled:
                task.abilities = coupled_defaults(task, self.abilities)
            by_scale[loss_scale] = task
        return by_scale[loss_scale]

    def uncast(self) -> Task:
        """Return the same task without ``torch.autocast``, which is how derivatives are taken."""
        if self.autocast is None:
            return self
        if "uncast" not in self._views:
            task = self.untraced()
            task.autocast, task.loss_scale, task.axes = None, 1.0, self.axes
            self._views["uncast"] = task
        return self._views["uncast"]

    def kinked(self) -> Task:
        """Return the same task, with the curvature of kinks included in its second derivatives."""
        task = copy.copy(self)
        task.kinks = True
        return task

    def variables(self, params: Params) -> Params:
        """Return the parameters in which derivatives are taken, and the buffers that training changes."""
        return {name: params[name] for name in (*self.chosen, *self.buffers)}

    def read(self, ids: Sequence[int], dataset: Dataset | None = None) -> Batch:
        """Read the examples with these ids, of the training set or another, as one batch on the model's device."""
        if dataset is None:
            return batches.to(batches.read(self.train_set, ids, self.collate), self.device)
        return batches.to(self.queries.read(dataset, ids), self.device)

    def outputs(self, params: Params, batch: Batch) -> tuple[Tensor, Any]:
        """Return the model's outputs and the targets they are compared with."""
        if isinstance(batch, TrainingBatch):
            return self._trained(params, batch)[0]
        # A running statistic has a derivative only if BatchNorm is written out.
        held = {name: value for name, value in params.items() if name in self.called.buffer_names}
        with weighted_batch_norm(None, held) if held else nullcontext():
            return self._pure(params, batch, frozenset())[0]

    def _pure(self, *args: Any) -> tuple[tuple[Tensor, Any], Params]:
        return kinked(self.called, *args) if self.kinks else self.called.pure(*args)

    def _trained(
        self, params: Params, batch: TrainingBatch, weights: Tensor | None = None
    ) -> tuple[tuple[Tensor, Any], Params]:
        """Return outputs and targets of a batch as training saw it, and the buffers after it."""
        draws = together(batch.draws, self.axes[tuple(batch.draws)] or {}) if batch.draws else batch.whole
        # Cloned, for models that write to them.
        held = {name: params[name].clone() for name in self.buffers}
        leaving = weights if self.statistics == "leave" else None
        nothing: AbstractContextManager[Params] = nullcontext({})
        with weighted_batch_norm(leaving, held) if self.coupled else nothing as new, self.casting():
            within = replay(draws) if draws else None
            both, after = self._pure({**params, **held}, batch.batch, self.training, within)
        return both, {name: new.get(name, after[name]) for name in self.buffers}

    def casting(self) -> AbstractContextManager:
        """Return a context that autocasts operations as in training; for values, not for higher-order derivatives."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast, cache_enabled=False)

    def live_losses(self, batch: Batch) -> Each:
        """Return losses of a batch under the current model, in its modes, whose mean is the training loss."""
        training = frozenset(name for name, module in self.called.named if module.training)
        (outputs, targets), _ = self.called.pure({}, batch, training)
        losses = self.parts.losses(outputs, targets)
        counts = self.parts.counts(outputs, targets) if self.counted and self.parts.counts else None
        if counts is not None:
            losses = losses * counts * (len(counts) if self.parts.summed else len(counts) / counts.sum())
        return losses + self._decay(self.parameters()) if self.l2 else losses

    def measuring(self, measure: Measure) -> Task:
        """Return the same task with another measure for its queries."""
        task = copy.copy(self)
        task.measure, task._measured = measure, measure_of(measure, self.loss)
        task._views, task._recorded_views = {}, {}
        return task

    def output_losses(self, outputs: Tensor, targets: Any) -> Each:
        """Return per-example losses of given outputs, without the L2 term."""
        return self.parts.losses(outputs, targets)

    def query_losses(self, params: Params, batch: Batch) -> Each:
        """Return per-example losses, without the L2 term."""
        return self.parts.losses(*self.outputs(params, batch))

    def output_measures(self, outputs: Tensor, targets: Any) -> Each:
        """Return the per-example measure of given outputs; by default the loss."""
        return (self._measured or self.parts.losses)(outputs, targets)

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
            return self.query_losses(params, part), {name: params[name] for name in self.buffers}
        both, moved = self._trained(params, part, weights)
        with self.casting():
            losses = self.parts.losses(*both)
        return (losses * part.scale if isinstance(part.scale, Tensor) else losses), moved

    def _decay(self, params: Params) -> Tensor:
        return 0.5 * self.l2 * sum_of(params[name].square().sum() for name in self.names)

    def objective(self, params: Params, weights: Each, batch: Batch, *, alone: bool = False) -> tuple[Tensor, Params]:
        """Compute (1/|Z|) Σ w_z ℓ(z, θ), and the buffers after the step's forward passes.

        Leaving an example out sets its weight to zero; the denominator stays. ``alone``: no stack of models or vectors.
        """
        total, start = None, 0
        moved: Params = {}
        for part in parts_of(batch):
            part_weights = weights[start : start + size_of(part)] if isinstance(batch, Window) else weights
            with nullcontext() if alone or self.autocast else Folded():  # a rearranged product rounds differently
                losses, moved = self._part_losses({**params, **moved}, part, part_weights)
                losses = losses + self._decay(params) if self.l2 else losses
            term = (part_weights * losses).sum()
            total = term if total is None else total + term
            start += len(part_weights)
        assert total is not None  # noqa: S101 - a window has a micro-batch
        return total / len(weights), moved

    def gradient(self, params: Params, weights: Each, batch: Batch, *, alone: bool = False) -> Params:
        """Compute ḡ(θ; w), the gradient of the weighted batch loss; for a buffer, its new value instead."""
        chosen_params = {name: params[name] for name in self.chosen}

        def scaled(chosen: Params) -> tuple[Tensor, Params]:
            loss, moved = self.objective({**params, **chosen}, weights, batch, alone=alone)
            return (loss if self.loss_scale == 1 else loss * self.loss_scale), moved

        value, moved = grad(scaled, has_aux=True)(chosen_params)
        if self.loss_scale != 1:
            value = {name: tensor / self.loss_scale for name, tensor in value.items()}
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

    def over(self, function: Callable, in_dims: Any = 0) -> Callable:
        """Apply ``vmap``, or a plain loop if the model has an operation that ``vmap`` cannot batch."""
        return side_by_side(function, in_dims) if self.abilities.vmap else looped(function, in_dims)

    def over_models(self, function: Callable, in_dims: Any = 0) -> Callable:
        """Do the same for many models instead of many examples."""
        return side_by_side(function, in_dims) if self.abilities.stacks else looped(function, in_dims)
