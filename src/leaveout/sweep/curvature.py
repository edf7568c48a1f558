"""What carries a vector through a step besides the optimizer itself: the curvature of the loss, or a stand-in for it.

Each kind gives the products of the batch and those of single examples; ACC corrects with the latter.
"""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leaveout._util.trees import Params, each, height, rows
from leaveout.errors import UnsupportedError
from leaveout.task.batches import Batch
from leaveout.task.calls import no_form
from leaveout.task.curvature_maps import FISHER, GAUSS_NEWTON, HESSIAN, CurvatureMap
from leaveout.task.derivatives import (
    batch_products,
    directional,
    directional_each,
    example_gradients,
    example_products,
    gradient,
    gradients_each,
    gradients_with,
    is_single,
    kink_widths,
    weight_products,
    weighted_changes,
)
from leaveout.task.forms import COUPLED
from leaveout.task.joint import directional_by_example
from leaveout.task.task import Task
from leaveout.task.training_batch import Window, has_shared_draws, size_of, take


class Curvature:
    """The batch gradient at one state, and its derivative, or a stand-in for it, applied to stacks of vectors.

    ``kind`` is the linear map of the curvature. ``chunk`` is the number of vectors that go through a product at a time,
    ``examples`` the number of per-example gradients; with ``threads``, so many vectors go through products of their
    own at a time.
    """

    kind: CurvatureMap = HESSIAN
    leaps: bool = False
    """Whether the curvature stands for leaps of the gradient."""

    def __init__(
        self,
        task: Task,
        params: Params,
        batch: Batch,
        chunk: int | None = None,
        examples: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.task, self.params, self.batch, self.chunk, self.threads = task, params, batch, chunk, threads
        self._examples = examples or chunk

    @cached_property
    def gradient(self) -> Params:
        """ḡ(θ; w¹); most products give it as well, and then it costs nothing extra."""
        return gradient(self.task, self.params, self.batch)

    @property
    def has_gradient(self) -> bool:
        """Say whether the gradient is known already."""
        return "gradient" in self.__dict__

    @property
    def _of_batch(self) -> tuple[Task, Params, Batch]:
        """The task, the parameters and the batch for derivatives of the batch."""
        return self.task, self.params, self.batch

    def _of_examples(self, examples: Batch) -> tuple[Task, Params, Batch]:
        """Return the task, the parameters and the batch for derivatives of single examples."""
        return self.task, self.params, examples

    def products(self, vectors: Params) -> tuple[Params, Float[Tensor, "vectors batch"]]:
        """Compute C(Z)·a and ⟨a, g_z⟩/|Z| for every vector a."""
        self.gradient, curved, reads = batch_products(*self._of_batch, vectors, self.chunk, self.kind)
        return curved, reads

    def reads(self, vectors: Params) -> Float[Tensor, "vectors batch"]:
        """Compute ⟨a, g_z⟩/|Z| for every vector a."""
        value, reads = weight_products(self.task, self.params, self.batch, vectors, self.chunk)
        if value is not None:
            self.gradient = value
        return reads

    def changes(
        self, vectors: Params, weights: Float[Tensor, "vectors batch"], added: Float[Tensor, "vectors batch"]
    ) -> Params:
        """Compute C(Z; w)·a + (1/|Z|) Σ ẇ_z g(z) for every vector a, with its own weights w and their change ẇ."""
        stacks = (vectors, weights, added)
        self.gradient, changes = weighted_changes(*self._of_batch, stacks, self.chunk, self.kind)
        return changes

    def shifts(self, like: Params, added: Float[Tensor, "vectors batch"]) -> Params:
        """Compute (1/|Z|) Σ ẇ_z g(z) for every row of changes ẇ; ``like`` is a stack of as many vectors."""
        return self.changes(each(torch.zeros_like, like), torch.ones_like(added), added)

    def example_products(self, examples: Batch, vectors: Params) -> tuple[Params, Params]:
        """Compute g(z) and C(z)·v for every example, each with a vector of its own, or all with one."""
        return example_products(*self._of_examples(examples), vectors, self.chunk, self.kind)

    def example_gradients(self, examples: Batch) -> Params:
        """Compute g(z) for every example."""
        return example_gradients(self.task, self.params, examples, self._examples)

    def shares(self, position: Int[Tensor, " chosen"]) -> Params:
        """Compute g(z)/|Z| for the examples at these positions in the batch."""
        size = size_of(self.batch)
        return each(lambda t: t / size, self.example_gradients(take(self.batch, position)))

    @property
    def separable(self) -> bool:
        """Say whether ḡ is a mean over examples that do not depend on each other."""
        return not self.task.coupled and not has_shared_draws(self.batch)

    def missing(self, left_out: Float[Tensor, "rows batch"]) -> Params:
        """Compute ḡ(w¹) − ḡ(w without its examples) for each row of marks, even if examples depend on each other."""
        kept = 1 - left_out
        less = self.threads and gradients_each(self.task, self.params, self.batch, kept, self.threads)
        less = less or gradients_with(self.task, self.params, self.batch, kept, self.chunk)
        return {name: self.gradient[name] - tensor for name, tensor in less.items()}

    def example_products_where(
        self, keep: Bool[Tensor, " examples"] | None, examples: Batch, vectors: Params
    ) -> tuple[Params, Params]:
        """Compute g(z), and C(z)·v for the examples to keep, zero for the others; None: for all."""
        if keep is None or bool(keep.all()):
            return self.example_products(examples, vectors)
        if not bool(keep.any()):
            gradients = self.example_gradients(examples)
            return gradients, each(torch.zeros_like, gradients)
        index, rest = keep.nonzero()[:, 0], (~keep).nonzero()[:, 0]
        chosen = vectors if is_single(vectors, self.params) else rows(vectors, index)
        chosen_gradients, curved = self.example_products(take(examples, index), chosen)
        order = torch.argsort(torch.cat([index, rest]))
        others = self.example_gradients(take(examples, rest))
        return (
            each(lambda a, b: torch.cat([a, b])[order], chosen_gradients, others),
            each(lambda a, b: torch.cat([a, torch.zeros_like(b)])[order], curved, others),
        )


class Hessian(Curvature):
    """The true curvature: SGD-IE, ACC."""

    def products(self, vectors: Params) -> tuple[Params, Float[Tensor, "vectors batch"]]:
        """Compute H·a and ⟨a, g_z⟩/|Z| for every vector a; one by one, they may do without the gradient."""
        if height(vectors) == 1:
            value, one, weights = directional(*self._of_batch, each(lambda t: t[0], vectors))
            curved, reads = each(lambda t: t[None], one), weights[None]
        elif self.threads and (result := directional_each(*self._of_batch, vectors, self.threads)):
            value, curved, reads = result
        else:
            return super().products(vectors)
        if value is not None:
            self.gradient = value
        return curved, reads


class HessianByExample(Hessian):
    """The Hessian whose product with one vector comes with per-example gradients, if both can be computed at once."""

    _shares: Params | None = None

    def products(self, vectors: Params) -> tuple[Params, Float[Tensor, "vectors batch"]]:
        """Compute H·a and ⟨a, g_z⟩/|Z| for every vector a; for a single one, g_z/|Z| as well."""
        together = self.task.abilities.together and self.separable and not isinstance(self.batch, Window)
        # For images, per-example kernels would take longer than a separate pass.
        if height(vectors) > 1 or not together or self.task.tracer.images:
            return super().products(vectors)
        one = each(lambda t: t[0], vectors)
        curved, reads, self._shares = directional_by_example(self.task, self.params, self.batch, one)
        return each(lambda t: t[None], curved), reads[None]

    def shares(self, position: Int[Tensor, " chosen"]) -> Params:
        """Return g(z)/|Z| as it came with the product, or compute it."""
        if self._shares is None:
            return super().shares(position)
        everyone = torch.arange(size_of(self.batch), device=position.device)
        return self._shares if torch.equal(position, everyone) else rows(self._shares, position)


class KinkedHessian(Hessian):
    """The Hessian in which kinks (ReLU and the like) have the curvature that crossing them causes on average.

    Gradients are the same. The widths of the bumps are those of the whole batch, even for single examples.
    """

    leaps = True

    def reads(self, vectors: Params) -> Float[Tensor, "vectors batch"]:
        """Compute ⟨a, g_z⟩/|Z| for every vector a, without kinks."""
        return self._plain.reads(vectors)

    def shifts(self, like: Params, added: Float[Tensor, "vectors batch"]) -> Params:
        """Compute (1/|Z|) Σ ẇ_z g(z) for every row of changes, without kinks."""
        return self._plain.shifts(like, added)

    @cached_property
    def _plain(self) -> Hessian:
        return Hessian(self.task, self.params, self.batch, self.chunk, self._examples, self.threads)

    @property
    def _of_batch(self) -> tuple[Task, Params, Batch]:
        if isinstance(self.batch, Window):  # each micro-batch would have widths of its own
            return self._of_examples(self.batch)
        return self.task.kinked(), self.params, self.batch

    def _of_examples(self, examples: Batch) -> tuple[Task, Params, Batch]:
        return self.task.kinked(), {**self.params, **self._widths}, examples

    @cached_property
    def _widths(self) -> Params:
        return kink_widths(self.task, self.params, self.batch)


class GaussNewton(Curvature):
    """(1/|Z|) Σ Jᵀ (∂²ℓ/∂outputs²) J with the Jacobian J of the outputs: the Hessian if the model were linear there.

    Positive semidefinite for convex losses; equal to the Hessian for linear models.
    """

    kind = GAUSS_NEWTON


class Fisher(Curvature):
    """(1/|Z|) Σ g gᵀ with the gradients g of the examples' losses without their L2 term, whose curvature is added."""

    kind = FISHER


class Flat(Curvature):
    """No curvature: only the derivative in the weights."""

    def products(self, vectors: Params) -> tuple[Params, Float[Tensor, "vectors batch"]]:
        """Return zero, and ⟨a, g_z⟩/|Z| for every vector a."""
        return each(torch.zeros_like, vectors), self.reads(vectors)

    def changes(
        self,
        vectors: Params,
        weights: Float[Tensor, "vectors batch"],  # noqa: ARG002
        added: Float[Tensor, "vectors batch"],
    ) -> Params:
        """Compute (1/|Z|) Σ ẇ_z g(z) for every row of changes."""
        if not self.separable:
            still = each(torch.zeros_like, vectors)
            stacks = (still, torch.ones_like(added), added)
            return weighted_changes(self.task, self.params, self.batch, stacks, self.chunk)[1]
        return each(lambda t: torch.tensordot(added, t, 1).div_(len(t)), self.example_gradients(self.batch))

    def example_products(self, examples: Batch, vectors: Params) -> tuple[Params, Params]:  # noqa: ARG002 - nothing is curved
        """Compute g(z), and zero."""
        gradients = self.example_gradients(examples)
        return gradients, each(torch.zeros_like, gradients)


def check_symmetric(task: Task, kind: type[Curvature] = Hessian) -> None:
    """Refuse stop-gradients if a product with J = ∂ḡ/∂θ would have to stand in for one with its transpose."""
    if issubclass(kind, Hessian) and not task.abilities.symmetric:
        if task.abilities.reason == COUPLED:
            raise no_form(COUPLED)
        raise UnsupportedError(
            f"{task.abilities.reason}, so that the derivative of the gradient is not a symmetric matrix, which this "
            "method takes it for: use SGDIE(), ACC(transport='exact') or Replay().",
            code="curvature-not-symmetric",
        )
