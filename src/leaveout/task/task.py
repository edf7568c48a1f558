"""Per-example losses, their gradients and Hessian-vector products, as pure functions of the parameters."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from numbers import Real
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset

from leaveout._util.trees import Params, sum_of
from leaveout.errors import InputError, UnsupportedError
from leaveout.task import batches
from leaveout.task.batches import Batch, Collate
from leaveout.task.checks import TRIAL, module_problems, trial_problems
from leaveout.task.folding import Folded
from leaveout.task.forms import Abilities
from leaveout.task.guard.compare import compared
from leaveout.task.rewriting import Batched, Unstopped, WrittenOut, plain_attention, quiet_loops
from leaveout.task.trace.tracer import Tracer

Forward: TypeAlias = Callable[[nn.Module, Batch], tuple[Tensor, Any]]
Loss: TypeAlias = Callable[[Any, Any], Tensor]

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


class Task:
    """What was trained: a model, a per-example loss and the training set.

    The batch loss is ``(1/|Z|) Σ_{z∈Z} w_z ℓ(z, θ)`` with ``ℓ(z, θ) = loss(model(x), y) + (l2/2)‖θ‖²``: the L2 term
    belongs to each example and leaves with it. (The loss of a query has no L2 term.)

    Args:
        model: any ``nn.Module``; its frozen parameters and buffers are constants.
        loss: an ``nn`` loss module, or a callable ``(outputs, targets) -> one loss per example``.
        train_set: a map-style data set; its positions are the examples' ids.
        l2: strength of the per-example L2 term over all trained parameters.
        forward: ``(model, batch) -> (outputs, targets)`` for batches that are neither ``(inputs..., targets)`` nor a
            dict of the model's keyword arguments plus one of ``labels, label, targets, target, y``.
        collate: the loader's ``collate_fn``, if it had one.
        trace: repeat recurring computations from a trace of their operations, which is quicker. What cannot be traced
            is logged (``logging.getLogger("leaveout")``, level INFO) and computed as it is.
        check: compare second derivatives, on the first examples, with differences of the gradient, now and at the
            state that is scored; a form that is wrong is not used. Under a second for a small model.
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
        trace: bool = True,
        check: bool = True,
    ) -> None:
        if batches.size(train_set) == 0:
            raise InputError("The training set is empty: give one with at least one example.", code="train-set-empty")
        if not _is_strength(l2):
            raise InputError(f"l2={l2!r} must be a finite number, 0 or more.", code="l2-out-of-range")
        self.model = model
        self.train_set = train_set
        self.l2 = l2
        self.collate = collate
        self._first = next(model.parameters(), None)  # asked for at every turn, and modules are slow to search
        self.names = tuple(name for name, param in model.named_parameters() if param.requires_grad)
        self.chosen = self.names
        self.check = check
        self._at: dict[int, Abilities] = {}
        images = any(isinstance(module, nn.Conv2d) for module in model.modules())
        self.tracer = Tracer(images, never=not trace)
        self.loss = loss
        self._loss = per_example(loss)
        self._bound = _Bound(model, forward or default_forward)
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
        problems = module_problems(model)
        if not problems:
            # What the modules' types do not show, a trial on the first examples does.
            problems, self.abilities = trial_problems(self, check)
        _refuse(problems)

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return torch.device("cpu") if self._first is None else self._first.device

    @property
    def size(self) -> int:
        """How many training examples there are."""
        return batches.size(self.train_set)

    def parameters(self) -> Params:
        """The model's current trained parameters."""
        return {name: param for name, param in self.model.named_parameters() if param.requires_grad}

    def restricted(self, layers: str | Sequence[str] | None) -> Task:
        """The same task with derivatives for chosen parameters only: names or patterns such as ``"head.*"``."""
        if layers is None:
            return self
        patterns = [layers] if isinstance(layers, str) else list(layers)
        unknown = [p for p in patterns if not any(fnmatchcase(name, p) for name in self.names)]
        if unknown or not patterns:
            raise InputError(
                f"layers={layers!r} names no trained parameter{f' by {unknown[0]!r}' if unknown else ''}: use names or "
                f"patterns such as 'head.*'; there are {', '.join(self.names)}.",
                code="layers-match-nothing",
            )
        task = self.untraced()
        task.chosen = tuple(name for name in self.names if any(fnmatchcase(name, p) for p in patterns))
        return task

    def untraced(self) -> Task:
        """The same task, of which nothing has been traced or compared yet."""
        task = copy.copy(self)
        task.tracer, task._at = self.tracer.fresh(), {}
        return task

    def quiet(self) -> Task:
        """The same task, of which nothing is ever traced."""
        task = copy.copy(self)
        task.tracer = Tracer(never=True)
        return task

    def widened(self) -> Task:
        """The same task in float64, as ``doubled``, of which nothing is ever traced; itself if it is in float64."""
        return self.quiet() if self.is_wide else self._double(self.quiet())

    @property
    def is_wide(self) -> bool:
        """Say whether it computes in float64."""
        return self._first is not None and self._first.dtype == torch.float64

    def compared_at(self, key: int, params: Params) -> Task:
        """The same task, with the forms of derivatives that are right at another state too; ``key`` names it."""
        if not self.check:
            return self
        if key not in self._at:
            batch = self.read(range(min(TRIAL, self.size)))
            problem, abilities = compared(self, params, batch, self.abilities)
            _refuse([f"at the run's last state, {problem}"] if problem else [])
            self._at[key] = abilities
        task = copy.copy(self)
        task.abilities = self._at[key]
        return task

    def doubled(self) -> Task:
        """The same task computed in float64; the data set stays as it is, and is converted batch by batch."""
        return self._double(self.untraced())

    def _double(self, task: Task) -> Task:
        task.model = copy.deepcopy(self.model).double()
        task._first = next(task.model.parameters(), None)
        task.loss = copy.deepcopy(self.loss).double() if isinstance(self.loss, nn.Module) else self.loss
        task._loss = per_example(task.loss)
        task._bound = _Bound(task.model, partial(_widely, self._bound.rule))
        return task

    def own(self, params: Params) -> Params:
        """Those parameters that derivatives are taken for."""
        return {name: params[name] for name in self.chosen}

    def read(self, ids: Sequence[int], dataset: Dataset | None = None) -> Batch:
        """The examples with these numbers, of the training set or another, as one batch on the model's device."""
        return batches.to(batches.read(dataset or self.train_set, ids, self.collate), self.device)

    def outputs(self, params: Params, batch: Batch) -> tuple[Tensor, Any]:
        """The model's outputs and the targets they are compared with."""
        # Fused attention kernels have neither forward-mode nor second derivatives.
        with sdpa_kernel(SDPBackend.MATH), plain_attention(), Batched() if self._recurrent else nullcontext():
            return functional_call(self._bound, {f"model.{name}": value for name, value in params.items()}, (batch,))

    def output_losses(self, outputs: Tensor, targets: Any) -> Float[Tensor, " batch"]:
        """Losses per example of given outputs, without the L2 term."""
        return self._loss(outputs, targets)

    def query_losses(self, params: Params, batch: Batch) -> Float[Tensor, " batch"]:
        """Losses per example, without the L2 term."""
        return self._loss(*self.outputs(params, batch))

    def losses(self, params: Params, batch: Batch) -> Float[Tensor, " batch"]:
        """ℓ(z, θ) for each example z of the batch."""
        losses = self.query_losses(params, batch)
        if self.l2:
            losses = losses + 0.5 * self.l2 * sum_of(params[name].square().sum() for name in self.names)
        return losses

    def weighted_loss(self, params: Params, weights: Float[Tensor, " batch"], batch: Batch) -> Float[Tensor, ""]:
        """(1/|Z|) Σ w_z ℓ(z, θ): leaving an example out sets its weight to zero, not the denominator."""
        with Folded():
            losses = self.losses(params, batch)
        return (weights * losses).sum() / len(weights)

    def gradient(self, params: Params, weights: Float[Tensor, " batch"], batch: Batch) -> Params:
        """ḡ(θ; w), the gradient of the weighted batch loss."""
        return grad(lambda own: self.weighted_loss({**params, **own}, weights, batch))(self.own(params))

    def example_loss(self, params: Params, example: Batch) -> Float[Tensor, ""]:
        """ℓ(z, θ) of one example, without a batch dimension."""
        return self.losses(params, batches.map_leaves(lambda leaf: leaf.unsqueeze(0), example))[0]

    def footprint(self, params: Params, batch: Batch) -> int:
        """Bytes that one forward pass keeps for its backward pass, beside parameters and inputs."""
        held: dict[int, Tensor] = {}
        shared = {leaf.data_ptr() for leaf in [*params.values(), *batches.leaves(batch)] if isinstance(leaf, Tensor)}

        def note(tensor: Tensor) -> None:  # handed back, a result would be part of its own history, and never freed
            if tensor.data_ptr() not in shared:
                held[tensor.data_ptr()] = tensor.detach()

        tracked = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda _: torch.empty(0)):
            self.losses(tracked, batch)
        return sum(tensor.numel() * tensor.element_size() for tensor in held.values())

    def unstopped(self) -> AbstractContextManager:
        """Within it, derivatives are those of the values: stop-gradients, which training keeps to, stop nothing."""
        if not self.abilities.slope:
            raise UnsupportedError(
                "The gradient of this task's loss is not the loss's derivative, which scores are made of: "
                f"{self.abilities.reason}. Use Replay().",
                code="gradient-not-a-derivative",
            )
        return Unstopped() if self.abilities.stops else nullcontext()

    def over(self, function: Callable, in_dims: Any = 0) -> Callable:
        """``vmap``, or a plain loop where the model has an operation that ``vmap`` cannot batch."""
        return side_by_side(function, in_dims) if self.abilities.vmap else looped(function, in_dims)

    def over_models(self, function: Callable, in_dims: Any = 0) -> Callable:
        """The same for many models instead of many examples."""
        return side_by_side(function, in_dims) if self.abilities.stacks else looped(function, in_dims)


def _is_strength(value: Any) -> bool:
    real = isinstance(value, Real)
    return real and bool(0 <= value <= sys.float_info.max)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UnsupportedError(
            "This task cannot be handled exactly:\n" + "\n".join(f"  - {p}" for p in problems),
            code="task-not-supported",
        )


def _widely(rule: Forward, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    return rule(model, batches.map_leaves(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch))


class _Bound(nn.Module):
    """The model with its forward rule, so that ``functional_call`` swaps parameters under any user's rule."""

    def __init__(self, model: nn.Module, rule: Forward) -> None:
        super().__init__()
        self.model = model
        self.rule = rule

    def forward(self, batch: Batch) -> tuple[Tensor, Any]:
        return self.rule(self.model, batch)


def default_forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    """``(inputs..., targets)``, or a dict with one target key and the model's keyword arguments."""
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        *inputs, targets = batch
        return model(*inputs), targets
    if isinstance(batch, dict):
        keys = [key for key in TARGET_KEYS if key in batch]
        if len(keys) == 1:
            return model(**{key: value for key, value in batch.items() if key != keys[0]}), batch[keys[0]]
    raise InputError(
        "A batch must be (inputs..., targets) or a dict with exactly one of the keys "
        f"{', '.join(TARGET_KEYS)}; for anything else give forward=lambda model, batch: (outputs, targets).",
        code="batch-not-understood",
    )


def per_example(loss: nn.Module | Loss) -> Loss:
    """The loss as one number per example, whose mean over a batch is what the training loop minimised."""
    if not isinstance(loss, nn.modules.loss._Loss):
        return loss
    if loss.reduction == "sum" or (isinstance(loss, nn.KLDivLoss) and loss.reduction == "batchmean"):
        raise UnsupportedError(
            f"{type(loss).__name__}(reduction={loss.reduction!r}) is not the mean over the batch's elements: "
            "train with reduction='mean', or give a callable that returns one loss per example and train on its mean.",
            code="loss-not-a-mean",
        )
    weighted = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None
    if weighted and loss.reduction != "none":  # with 'none' the training loop takes the mean itself
        raise UnsupportedError(
            f"{type(loss).__name__}(weight=...) divides by the batch's summed class weights, so an example's part "
            "depends on its neighbours: give a callable with reduction='none' and train on its mean.",
            code="loss-not-a-mean",
        )
    single = copy.copy(loss)
    single.reduction = "none"
    return partial(_example_losses, single)


def _example_losses(single: nn.Module, outputs: Any, targets: Any) -> Tensor:
    values = single(outputs, targets)
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def side_by_side(function: Callable, in_dims: Any = 0) -> Callable:
    """``vmap``, with operations written out that it has no rule for."""

    def call(*args: Any) -> Any:
        with WrittenOut(), quiet_loops():
            return vmap(function, in_dims)(*args)

    return call


def looped(function: Callable, in_dims: Any = 0) -> Callable:
    """``vmap`` by a Python loop: slower, the same values, for operations without a batching rule."""

    def call(*args: Any) -> Any:
        dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
        count = next(len(batches.leaves(a)[0]) for a, dim in zip(args, dims, strict=True) if dim == 0)
        results = [
            function(*(_pick(arg, i) if dim == 0 else arg for arg, dim in zip(args, dims, strict=True)))
            for i in range(count)
        ]
        return _stack(results)

    return call


def _pick(nest: Any, i: int) -> Any:
    return batches.map_leaves(lambda leaf: leaf[i], nest)


def _stack(nests: list[Any]) -> Any:
    first = nests[0]
    if isinstance(first, dict):
        return {key: _stack([nest[key] for nest in nests]) for key in first}
    if isinstance(first, tuple | list):
        return type(first)(_stack([nest[i] for nest in nests]) for i in range(len(first)))
    return torch.stack(nests)


def take(batch: Batch, index: Int[Tensor, " chosen"]) -> Batch:
    """The chosen examples of a batch."""
    return batches.map_leaves(lambda leaf: leaf[index], batch)
