"""One recorded step s' = O(s, ḡ(θ; w)), linearised: Jacobian products, and how leaving examples out changes it.

``O`` is the optimizer's elementwise step, ``ḡ(θ; w) = (1/|Z|) Σ w_z g(z, θ)`` the weighted batch gradient. So
``∂F = ∂_s O + ∂_g O · H(w)``: the optimizer's part is exact and cheap, and the curvature enters in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leaveout._util.blocks import Block, Coordinates, blocks
from leaveout._util.trees import (
    PARAM,
    Params,
    State,
    add_rows,
    each,
    expand,
    flat_rows,
    gather_sums,
    height,
    inner_rows,
    replace_rows,
    rows,
    state_rows,
    zeros,
)
from leaveout.diff.operator import Product, StepOperator
from leaveout.optim import Rule
from leaveout.optim.definition import Slots
from leaveout.sweep.leaps import dampings
from leaveout.sweep.leaving import Leaving, Pairs, removed, taken_out
from leaveout.trajectory.recorded_step import RecordedStep

Keep: TypeAlias = Bool[Tensor, " pairs"] | None
"""Which pairs are corrected; None: all of them. Either all of a row's pairs are corrected, or none."""


BLOCK = 1 << 18
"""How many numbers of a jump are processed at a time."""

ROUNDING = 64
"""By how many units in the last place ḡ and a row's part of it may differ by rounding alone."""


class Pulled(NamedTuple):
    """Vectors pulled back through a step.

    Attributes:
        state: what reaches the state before the step.
        carried: the same without curvature.
        along: what reaches the batch gradient.
        product: what the curvature made of that, and the examples' readings.
        arriving: the vectors before they were pulled back.
        step: the step.
    """

    state: State
    carried: State
    along: Params
    product: Product
    arriving: State
    step: LinearStep

    @property
    def reads(self) -> Float[Tensor, "vectors batch"]:
        """The derivative along each vector in each example's weight."""
        return self.product.reads

    @property
    def gradient(self) -> Params | None:
        """ḡ(θ; w¹), if it was computed on the way."""
        return self.product.gradient

    def base(self, leaving: Leaving | None = None) -> Base:
        """Return the step from which jumps are measured: with the gradient at which it was linearised."""
        return self.step.base(leaving, self.gradient if self.step.linear else None)

    def add_to(self, totals: Float[Tensor, "rows vectors"], pairs: Pairs) -> None:
        """Add −(∂F/∂w_k)ᵀu, the first-order effect of leaving k out here, to the total of each row without k."""
        row, position = pairs
        add_rows(totals, row, self.reads[:, position].T, alpha=-1)


class Pushed(NamedTuple):
    """Displacements after a step, and ḡ(θ; w¹) if it was computed on the way."""

    state: State
    gradient: Params | None = None


class Base(NamedTuple):
    """A batch gradient, and the state O(s, ḡ) after the step with it."""

    gradient: Params
    state: State


class Jumps(NamedTuple):
    """Γ of some rows, block by block: the coordinates of each block, and a function that computes Γ there."""

    blocks: list[Coordinates]
    of: Callable[[Coordinates], Slots]


class LinearStep:
    """The derivative of one step at its recorded state: with every example, and with each row's examples left out.

    ``path`` is applied to whatever reaches the step as a change of the batch gradient (a symmetric linear map, such as
    a projection; by default nothing).
    """

    def __init__(
        self, rule: Rule, recorded: RecordedStep, operator: StepOperator, path: Callable[[Params], Params] | None = None
    ) -> None:
        self._rule = rule.beside(recorded.params, recorded.objective.names)
        self._recorded, self.operator = recorded, operator
        self._path = path or (lambda params: params)
        self.hypers, self.linear = recorded.record.hypers, rule.linear

    @cached_property
    def consumed(self) -> Params | None:
        """The gradient that was used, if the recorded states tell, or None."""
        recorded = self._recorded
        return self._rule.consumed(recorded.before, recorded.after, self.hypers) if recorded.exact else None

    @cached_property
    def computed(self) -> Params:
        """ḡ(θ; w¹), computed."""
        return self.operator.gradient()

    @property
    def used(self) -> Params:
        """The gradient at which the step is linearised: recovered from the states up to rounding, or computed."""
        return self.computed if self.consumed is None else self.consumed

    def after(self, gradient: Params | None) -> State:
        """Take the step again, with this gradient or one that is computed for it."""
        return self._rule.step(self._recorded.before, self.computed if gradient is None else gradient, self.hypers)

    def arrive(self, vectors: State) -> tuple[State, Params]:
        """Pull vectors back through the optimizer's step alone: to the state, and to the batch gradient."""
        state, along = self._rule.cotangent(self._at(height(vectors[PARAM])), vectors, self.hypers)
        return state, self._path(along)

    def pull(self, vectors: State) -> Pulled:
        """Compute ∂F(w¹)ᵀ·u for the state, for the batch gradient, and for each example's weight."""
        carried, along = self.arrive(vectors)
        product = self.operator.pull(self._damped(along))
        if self._dampings:
            product = product._replace(reads=self.operator.reads(along)[0])
        return self.pulled(vectors, carried, along, product)

    def pulled(self, vectors: State, carried: State, along: Params, product: Product) -> Pulled:
        """Join what arrived and what the curvature made of it."""
        known = self.__dict__.get("computed") if product.gradient is None else product.gradient
        return Pulled(_plus(carried, product.curved), carried, along, product._replace(gradient=known), vectors, self)

    def push(self, vectors: State, pairs: Pairs) -> Pushed:
        """Compute ∂F(w¹)·δ + γ: SGD-IE's step, with its examples' first-order effect. Overwrites the vectors."""
        missed = self._marked(vectors, pairs)
        along, gradient = self._changes(vectors[PARAM], torch.ones_like(missed), -missed)
        return Pushed(self._tangent(vectors, along, gradient), gradient)

    def inject(self, pairs: Pairs, count: int) -> Pushed:
        """Compute γ alone, for ``count`` rows."""
        still = zeros(self._recorded.before, count)
        if not self.operator.separable:
            missed = self._marked(still, pairs)
            change, gradient = self.operator.push(still[PARAM], torch.ones_like(missed), -missed)
            return Pushed(self._tangent(still, self._path(change), gradient), gradient)
        leaving = self.leaving(pairs)
        missing = gather_sums(each(torch.neg, leaving.shares), leaving.rows, count)
        return Pushed(self._tangent(still, missing, None))

    def push_corrected(self, vectors: State, pairs: Pairs, keep: Keep = None) -> Pushed:
        """Compute ∂F(w^{−k})·δ + Γ: ACC's step, the counterfactual step linearised at the recorded state.

        Rows that are not kept take SGD-IE's step. Overwrites the vectors.
        """
        missed = self._marked(vectors, pairs)
        own_pairs = pairs if keep is None else _where(pairs, keep)
        without = missed if keep is None else self._marked(vectors, own_pairs)
        if self._rule.linear and self.operator.separable:  # then Γ = γ, and one tangent serves all
            along, gradient = self._changes(vectors[PARAM], 1 - without, -missed)
            return Pushed(self._tangent(vectors, along, gradient), gradient)
        along, gradient = self._changes(vectors[PARAM], 1 - without, without - missed)
        pushed = self._tangent(vectors, along, gradient)
        if not len(own_pairs[0]):
            return Pushed(pushed, gradient)
        leaving = self.leaving(own_pairs)
        base = self.base(leaving, gradient)
        own = self._counterfactual(leaving, base)
        tangent = self._rule.tangent(own, (state_rows(vectors, leaving.rows), rows(along, leaving.rows)), self.hypers)
        jump = self._jump(own, base)
        moved = {slot: each(torch.add, tangent[slot], jump[slot]) for slot in tangent}
        return Pushed(replace_rows(pushed, leaving.rows, moved), gradient)

    def pull_corrected(self, vectors: State, pairs: Pairs, keep: Keep = None) -> tuple[Pushed, Float[Tensor, " rows"]]:
        """Compute ∂F(w^{−k})ᵀ·a_k for each row's own vector, and ⟨a_k, Γ_k⟩.

        Rows that are not kept are treated as in SGD-IE.
        """
        count = height(vectors[PARAM])
        reads = next(iter(vectors[PARAM].values())).new_zeros(count)
        state, along = self._rule.cotangent(self._at(count), vectors, self.hypers)
        if keep is not None:
            plain = self.leaving(_where(pairs, ~keep))
            reads[plain.rows] = -inner_rows(rows(along, plain.rows), plain.shares)
            pairs = _where(pairs, keep)
        if len(pairs[0]):
            leaving = self.leaving(pairs)
            affected, base = leaving.rows, self.base(leaving)
            own, own_vectors = self._counterfactual(leaving, base), state_rows(vectors, affected)
            jump = self._jump(own, base)
            reads[affected] = sum(inner_rows(own_vectors[slot], jump[slot]) for slot in jump)
            if not self._rule.linear:
                own_state, own_along = self._rule.cotangent(own, own_vectors, self.hypers)
                state = replace_rows(state, affected, own_state)
                along = replace_rows({PARAM: along}, affected, {PARAM: own_along})[PARAM]
        along = self._path(along)
        without = self._marked(vectors, pairs)
        curved, gradient = self.operator.push(self._damped(along), 1 - without, torch.zeros_like(without))
        return Pushed(_plus(state, curved), gradient), reads

    def jumps(self, leaving: Leaving, base: Base) -> Jumps:
        """Return each row's Γ: the step without its examples minus the base.

        Γ comes in blocks, some coordinates of all rows, small enough to stay in the CPU cache while in use; coordinates
        that are zero because their gradient is may be left out.
        """
        if not self._rule.by_coordinate:
            whole = self._jump(self._counterfactual(leaving, base), base)
            return Jumps([Block(name) for name in leaving.shares], lambda block: _slots(whole, block.name))
        shares = each(Tensor.contiguous, self._taken(leaving, base))
        rule, states = self._rule, (self._recorded.before, base.state)

        def of(block: Coordinates) -> Slots:
            before, after = ({slot: block.of(state[slot]) for slot in rule.slots} for state in states)
            whole = block.of(base.gradient)
            gradients = (whole, _rounded(whole, block.of_rows(shares), before))
            return rule.jumped(block.name, (before, after), gradients, self.hypers)

        return Jumps(list(blocks(shares, BLOCK, rule.groups)), of)

    def _changes(
        self, vectors: Params, weights: Float[Tensor, "rows batch"], added: Float[Tensor, "rows batch"]
    ) -> tuple[Params, Params | None]:
        """Compute what reaches the step as C(Z; w)·δ + (1/|Z|) Σ ẇ_z g(z); and ḡ, if at hand."""
        if not self._dampings:
            change, gradient = self.operator.push(vectors, weights, added)
            return self._path(change), gradient
        change, gradient = self.operator.push(vectors, weights, torch.zeros_like(added))
        curved = self._damped(change)
        if added.any():
            curved = each(torch.add, curved, self.operator.shifts(added)[0])
        return self._path(curved), gradient

    def _damped(self, change: Params) -> Params:
        """Return how much of a change of the batch gradient counts, if the gradient changes in leaps."""
        return {**change, **{name: change[name] * damping for name, damping in self._dampings.items()}}

    @cached_property
    def _dampings(self) -> Params:
        return dampings(self._rule, self._recorded) if self.operator.leaps and self._rule.divides else {}

    def _marked(self, vectors: State, pairs: Pairs) -> Float[Tensor, "rows batch"]:
        """Return one where a row leaves out an example of the batch, zero elsewhere."""
        like = next(iter(vectors[PARAM].values()))
        marked = like.new_zeros((len(like), len(self._recorded.record.ids)))
        marked[pairs] = 1
        return marked

    def _at(self, count: int, gradient: Params | None = None) -> tuple[State, Params]:
        # A linear step has the same derivative everywhere, so any gradient will do if none is known.
        if gradient is None:
            gradient = self._recorded.before[PARAM] if self._rule.linear else self.used
        return expand(self._recorded.before, count), expand({PARAM: gradient}, count)[PARAM]

    def _tangent(self, state: State, along: Params, gradient: Params | None) -> State:
        if self._rule.linear:  # it is its own derivative
            return self._rule.steps_(state, along, self.hypers)
        return self._rule.tangent(self._at(height(state[PARAM]), gradient), (state, along), self.hypers)

    def _counterfactual(self, leaving: Leaving, base: Base) -> tuple[State, Params]:
        """Return the recorded state, and the batch gradient without each row's examples."""
        shares = self._taken(leaving, base)
        state, whole = self._at(height(shares), base.gradient)
        if self._rule.linear:
            return state, each(torch.sub, whole, shares)
        return state, {n: whole[n] - _rounded(whole[n], left, self._slots_of(n)) for n, left in shares.items()}

    def _taken(self, leaving: Leaving, base: Base) -> Params:
        """Return the rows' shares; a row that leaves out the whole batch leaves no gradient at all."""
        if self._rule.linear or not leaving.everyone.any():
            return leaving.shares
        whole = self._path({name: tensor[None] for name, tensor in base.gradient.items()})
        return {name: _with_rows(tensor, leaving.everyone, whole[name]) for name, tensor in leaving.shares.items()}

    def base(self, leaving: Leaving | None = None, gradient: Params | None = None) -> Base:
        """Return the step from which jumps are measured: with this ḡ, or the one that was used."""
        whole = {**(self.used if gradient is None else gradient), **(leaving.total if leaving else {})}
        return Base(whole, self._rule.step(self._recorded.before, whole, self.hypers))

    def _jump(self, own: tuple[State, Params], base: Base) -> State:
        """Compute Γ = O(s, ḡ without the row's examples) − O(s, ḡ)."""
        stepped = self._rule.steps(*own, self.hypers)
        return {slot: each(torch.sub, stepped[slot], base.state[slot]) for slot in stepped}

    def leaving(self, pairs: Pairs, known: Product | None = None, base: Base | None = None) -> Leaving:
        """Return what each row's examples contributed to the batch gradient, after ``path``.

        What is ``known`` of the batch is not computed again; ``base`` is that of other rows of this step.
        """
        if not len(pairs[0]):
            return Leaving(pairs[0], self._nothing(), pairs[0].bool(), {})
        if self.operator.separable:
            shares, sensitive = known.shares if known else None, self._sensitive if base is None else []
            leaving = taken_out(self.operator, pairs, shares, sensitive)
        else:
            gradient = known.gradient if known else None
            leaving = removed(self.operator, pairs, self.computed if gradient is None else gradient)
        return leaving._replace(shares=self._path(leaving.shares))

    @cached_property
    def _sensitive(self) -> list[str]:
        """The parameters with a moment that is still zero: a gradient's last digits can become a whole step there."""
        if self._rule.linear:
            return []
        return [name for name in self._rule.groups if _has_zeros(self._slots_of(name))]

    def _slots_of(self, name: str) -> Slots:
        return {slot: params[name] for slot, params in self._recorded.before.items() if name in params}

    def _nothing(self) -> Params:
        params = self._recorded.before[PARAM]
        return {name: tensor.new_zeros((0, *tensor.shape)) for name, tensor in params.items()}


def _with_rows(stack: Tensor, chosen: Bool[Tensor, " rows"], value: Tensor) -> Tensor:
    """Return a stack in which the chosen rows are this value."""
    return torch.where(chosen.view(-1, *[1] * (stack.ndim - 1)), value, stack)


def _rounded(gradient: Tensor, leaving: Tensor, before: Slots) -> Tensor:
    """Return ℓ, or ḡ itself where the two differ by rounding alone: there ḡ − ℓ is zero.

    So it is in coordinates that only the left-out examples use: an embedding of a rare word, a feature that is zero in
    all others. They come from different kernels, and Adam, whose step depends little on its gradient's size, would turn
    their last digits into a whole step wherever its moments are still zero. Elsewhere rounding does no harm.
    """
    if not _has_zeros(before):
        return leaving
    near = (gradient - leaving).abs_() <= ROUNDING * torch.finfo(leaving.dtype).eps * leaving.abs()
    return torch.where(near, gradient, leaving)


def _has_zeros(slots: Slots) -> bool:
    return not all(bool(values.all()) for slot, values in slots.items() if slot != PARAM)


def _slots(state: State, name: str) -> Slots:
    return {slot: flat_rows(params[name]) for slot, params in state.items() if name in params}


def _plus(state: State, params: Params) -> State:
    return {**state, PARAM: each(torch.add, state[PARAM], params)}


def _where(pairs: Pairs, keep: Bool[Tensor, " pairs"]) -> tuple[Int[Tensor, " kept"], Int[Tensor, " kept"]]:
    return pairs[0][keep], pairs[1][keep]
