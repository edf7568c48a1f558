"""What was trained: an objective and the training set, with derivatives compared before anything relies on them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import Dataset

from leaveout._util.generators import aside
from leaveout._util.trees import Params
from leaveout.optim.clip import clip_of
from leaveout.optim.rule import Penalty
from leaveout.task import batches
from leaveout.task.batches import Batch, Collate
from leaveout.task.checks import check_options, check_penalty, examined, refuse
from leaveout.task.execution import Execution, Memory
from leaveout.task.forward import Forward
from leaveout.task.losses import Loss, call_name
from leaveout.task.measures import Measure
from leaveout.task.modules import module_problems
from leaveout.task.objective import Objective, objective_of
from leaveout.task.queries import Queries


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
        penalty: what the training loop added to the loss of every step, ``penalty(params) -> number``, a function of
            all trained parameters by name: ``lambda params: 1e-4 * sum(p.abs().sum() for p in params.values())``. It
            belongs to no example: it stays when examples leave, and is no part of a query's loss.
        statistics: for BatchNorm in training mode: a left-out example also leaves the batch's statistics
            (``"leave"``), as if it had not been in the batch, or stays in them and only its loss is dropped
            (``"stay"``), as it does in any other buffer that the model writes to.
        accumulation: for a step on several micro-batches: ``"mean"`` if their losses were averaged, as by
            ``(loss / k).backward()``; ``"sum"`` if they were added; ``"window"`` if they were divided by the whole
            window's denominator; or a number k if they were divided by k, however many there were.
        measure: what is computed for each query, if not its loss: ``"margin"``, ``"log_prob"``, ``"correct"``, or a
            function ``(outputs, targets) -> one number per example``; ``task.measuring(...)`` changes it later.
        trace: repeat recurring computations from a trace of their operations, which is faster. Operations that cannot
            be traced are logged (``logging.getLogger("leaveout")``, level INFO) and computed without a trace.
        check: compare second derivatives, on random examples, with finite differences of the gradient, now and at
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
        penalty: Penalty | None = None,
        statistics: str = "leave",
        accumulation: str | int = "mean",
        measure: Measure = "loss",
        trace: bool = True,
        check: bool = True,
    ) -> None:
        check_options(model, loss, train_set, l2, statistics, accumulation)
        self.train_set, self.collate, self.check, self.queries = train_set, collate, check, Queries(collate)
        images = any(isinstance(module, nn.Conv2d) for module in model.modules())
        fields = {"l2": l2, "clip": clip_of(clip_norm, clip_value), "penalty": penalty, "measure": measure}
        how = {"statistics": statistics, "accumulation": accumulation}
        given = objective_of(model, loss, forward, Execution(memory=Memory(images, never=not trace)), **fields, **how)
        refuse(module_problems(given.model))
        check_penalty(given)
        # A trial on some examples finds what the modules' types do not show.
        with aside():
            self.objective, self.random_data = examined(given, train_set, collate, check=check)

    def __repr__(self) -> str:
        return f"Task({type(self.model).__name__}, {call_name(self.loss)}, {self.size} training examples)"

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.objective.model

    @property
    def loss(self) -> nn.Module | Loss:
        """The loss."""
        return self.objective.loss

    @property
    def measure(self) -> Measure:
        """What is computed for each query."""
        return self.objective.measure

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return self.objective.device

    @property
    def size(self) -> int:
        """The number of training examples."""
        return batches.size(self.train_set)

    def parameters(self) -> Params:
        """Return the model's current trained parameters."""
        return self.objective.parameters()

    def measuring(self, measure: Measure) -> Task:
        """Return the same task with another measure for its queries."""
        return self.of(self.objective.measuring(measure))

    def anew(self) -> Task:
        """Return the same task with nothing traced or found out yet."""
        return self.of(self.objective.anew())

    def of(self, objective: Objective) -> Task:
        """Return the same task with another objective for its data."""
        other = copy.copy(self)
        other.objective = objective
        return other

    def read(self, ids: Sequence[int], dataset: Dataset | None = None) -> Batch:
        """Read the examples with these ids, of the training set or another, as one batch on the model's device."""
        if dataset is None:
            return batches.to(batches.read(self.train_set, ids, self.collate), self.device)
        return batches.to(self.queries.read(dataset, ids), self.device)
