"""One recorded step s' = O(s, ḡ(θ; w)), linearised: Jacobian products, and what leaving examples out changes in it.

``O`` is the optimizer's elementwise step, ``ḡ(θ; w) = (1/|Z|) Σ w_z g(z, θ)`` the weighted batch gradient. So
``∂F = ∂_s O + ∂_g O · H(w)``: the optimizer's part is exact and cheap, and the curvature enters in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import grad

from leaveout.batches import Batch, leaves
from leaveout.optim import Rule
from leaveout.task import Task, take
from leaveout.trajectory import Moment
from leaveout.vectors import (
    PARAM,
    Params,
    State,
    each,
    expand,
    gather_sums,
    inner_rows,
    pullback,
    replace_rows,
    rows,
    state_rows,
    zeros,
)

Pairs: TypeAlias = tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]
"""(row, position in the batch): the row leaves out the example at that position."""


@dataclass(frozen=True)
class GradientMap:
    """The batch gradient at one state and its derivative: ``products(A)`` gives H·a and ⟨a, g_z⟩/|Z| for every a."""

    gradient: Params
    products: Callable[[Params], tuple[Params, Float[Tensor, "vectors batch"]]]


Curvature: TypeAlias = Callable[[Task, Params, Batch, int | None], GradientMap]


def hessian(task: Task, params: Params, batch: Batch, chunk: int | None = None) -> GradientMap:
    """The true curvature: the derivative of (θ, w) ↦ ḡ(θ; w), pulled back; both parts come from the same pass."""
    gradient, pull = pullback(lambda p, w: task.gradient(p, w, batch), params, _ones(params, batch))
    return GradientMap(gradient, task.over(pull, chunk=chunk))


def flat(task: Task, params: Params, batch: Batch, chunk: int | None = None) -> GradientMap:
    """No curvature: only the derivative in the weights."""
    gradient, pull = pullback(lambda w: task.gradient(params, w, batch), _ones(params, batch))
    reads = task.over(lambda vector: pull(vector)[0], chunk=chunk)
    return GradientMap(gradient, lambda vectors: (each(torch.zeros_like, vectors), reads(vectors)))


def _ones(params: Params, batch: Batch) -> Tensor:
    like = next(iter(params.values()))
    return torch.ones(len(leaves(batch)[0]), dtype=like.dtype, device=like.device)


class LinearStep:
    """The derivative of one step at its recorded state: with every example, and with each row's examples left out.

    ``after`` is the step computed again, F(s; w¹), to be compared with the recorded state.
    """

    def __init__(self, task: Task, rule: Rule, moment: Moment, curvature: Curvature, chunk: int | None = None) -> None:
        self._task, self._rule, self._moment, self._chunk = task, rule, moment, chunk
        self._hypers = moment.record.hypers
        self._map = curvature(task, moment.before[PARAM], moment.batch, chunk)
        self.after = rule.step(moment.before, self._map.gradient, self._hypers)

    def pull(self, vectors: State) -> tuple[State, Float[Tensor, "vectors batch"]]:
        """∂F(w¹)ᵀ·u in the state, and in each example's weight: (∂F/∂w_z)ᵀ·u."""
        state, along = self._rule.cotangent(self._at(_height(vectors)), vectors, self._hypers)
        curved, reads = self._map.products(along)
        return _plus(state, curved), reads

    def push(self, vectors: State, pairs: Pairs) -> State:
        """∂F(w¹)·δ + γ: SGD-IE's step, with the first-order effect of each row's examples."""
        along, _ = self._map.products(vectors[PARAM])
        affected, gradient = self._left_out(pairs)
        return self._tangent(vectors, _subtract(along, affected, gradient))

    def inject(self, pairs: Pairs, count: int) -> State:
        """γ alone, for ``count`` rows."""
        zero = zeros(self._moment.before, count)
        affected, gradient = self._left_out(pairs)
        return self._tangent(zero, _subtract(zero[PARAM], affected, gradient))

    def push_corrected(self, vectors: State, pairs: Pairs) -> State:
        """∂F(w^{−k})·δ + Γ: ACC's step, the counterfactual step linearised at the recorded state."""
        along, _ = self._map.products(vectors[PARAM])
        affected, gradient, curved = self._left_out_curved(pairs, vectors[PARAM])
        if self._rule.linear:  # then Γ = γ, and one tangent serves all
            return self._tangent(vectors, _subtract(along, affected, each(torch.add, gradient, curved)))
        pushed = self._tangent(vectors, along)
        own = self._counterfactual(gradient)
        tangent = self._rule.tangent(
            own, (state_rows(vectors, affected), each(torch.sub, rows(along, affected), curved)), self._hypers
        )
        jump = self._jump(own)
        return replace_rows(pushed, affected, {slot: each(torch.add, tangent[slot], jump[slot]) for slot in tangent})

    def pull_corrected(self, vectors: State, pairs: Pairs) -> tuple[State, Float[Tensor, " rows"]]:
        """∂F(w^{−k})ᵀ·a_k for each row's own vector, and ⟨a_k, Γ_k⟩."""
        count = _height(vectors)
        read = next(iter(vectors[PARAM].values())).new_zeros(count)
        state, along = self._rule.cotangent(self._at(count), vectors, self._hypers)
        affected, gradient = self._left_out(pairs)
        if len(affected):
            own = self._counterfactual(gradient)
            own_vectors = state_rows(vectors, affected)
            jump = self._jump(own)
            read[affected] = sum(inner_rows(own_vectors[slot], jump[slot]) for slot in jump)
            if not self._rule.linear:
                own_state, own_along = self._rule.cotangent(own, own_vectors, self._hypers)
                state = replace_rows(state, affected, own_state)
                along = replace_rows({PARAM: along}, affected, {PARAM: own_along})[PARAM]
        curved, _ = self._map.products(along)
        _, _, own_curved = self._left_out_curved(pairs, along)
        return _plus(state, _subtract(curved, affected, own_curved)), read

    def _at(self, count: int) -> tuple[State, Params]:
        return expand(self._moment.before, count), expand({PARAM: self._map.gradient}, count)[PARAM]

    def _tangent(self, state: State, gradient: Params) -> State:
        return self._rule.tangent(self._at(_height(state)), (state, gradient), self._hypers)

    def _counterfactual(self, gradient: Params) -> tuple[State, Params]:
        """The recorded state with the batch gradient that lacks each row's examples."""
        state, batch_gradient = self._at(len(next(iter(gradient.values()))))
        return state, each(torch.sub, batch_gradient, gradient)

    def _jump(self, own: tuple[State, Params]) -> State:
        """Γ = O(s, ḡ without the row's examples) − O(s, ḡ)."""
        stepped = self._rule.step(*own, self._hypers)
        return {slot: each(torch.sub, stepped[slot], self.after[slot]) for slot in stepped}

    def _left_out(self, pairs: Pairs) -> tuple[Int[Tensor, " affected"], Params]:
        """The rows with an example in this batch, and (1/|Z|) Σ g(z) over each one's examples."""
        row, position = pairs
        affected, local = torch.unique(row, return_inverse=True)
        params = self._moment.before[PARAM]
        if not len(affected):
            return affected, {name: tensor.new_zeros((0, *tensor.shape)) for name, tensor in params.items()}
        gradients = self._task.over(grad(self._task.example_loss), (None, 0), self._chunk)(
            params, take(self._moment.batch, position)
        )
        return affected, self._mean(gradients, local, len(affected))

    def _left_out_curved(self, pairs: Pairs, vectors: Params) -> tuple[Int[Tensor, " affected"], Params, Params]:
        """As ``_left_out``, and (1/|Z|) Σ H(z)·v with each row's own vector, in the same pass."""
        row, position = pairs
        affected, local = torch.unique(row, return_inverse=True)
        params = self._moment.before[PARAM]
        if not len(affected):
            nothing = {name: tensor.new_zeros((0, *tensor.shape)) for name, tensor in params.items()}
            return affected, nothing, nothing
        gradients, curved = self._task.example_products(
            params, take(self._moment.batch, position), rows(vectors, row), self._chunk
        )
        count = len(affected)
        return affected, self._mean(gradients, local, count), self._mean(curved, local, count)

    def _mean(self, terms: Params, local: Int[Tensor, " pairs"], count: int) -> Params:
        size = len(self._moment.record.ids)
        return each(lambda tensor: tensor / size, gather_sums(terms, local, count))


def _height(stack: State) -> int:
    return len(next(iter(stack[PARAM].values())))


def _plus(state: State, params: Params) -> State:
    return {**state, PARAM: each(torch.add, state[PARAM], params)}


def _subtract(stack: Params, index: Int[Tensor, " chosen"], terms: Params) -> Params:
    return {name: tensor.index_add(0, index, terms[name], alpha=-1) for name, tensor in stack.items()}
