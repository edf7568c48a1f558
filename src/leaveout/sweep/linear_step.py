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
from leaveout.optim import Rule
from leaveout.optim.definition import Slots
from leaveout.sweep.curvature import Curvature
from leaveout.sweep.leaps import dampings
from leaveout.trajectory.recorded_step import RecordedStep

Pairs: TypeAlias = tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]
"""(row, position in the batch): the row leaves out the example at that position."""

Keep: TypeAlias = Bool[Tensor, " pairs"] | None
"""Which pairs are corrected; None: all of them. Either all of a row's pairs are corrected, or none."""


BLOCK = 1 << 18
"""How many numbers of a jump are processed at a time."""

ROUNDING = 64
"""By how many units in the last place ḡ and a row's part of it may differ by rounding alone."""


class Pulled(NamedTuple):
    """Vectors pulled back: to the state (``carried``: without curvature), to the batch gradient and to the weights.

    ``arriving`` are the vectors before they were pulled back, ``step`` is the step they were pulled through.
    """

    state: State
    carried: State
    gradient: Params
    weights: Float[Tensor, "vectors batch"]
    arriving: State
    step: LinearStep

    def add_to(self, totals: Float[Tensor, "rows vectors"], pairs: Pairs) -> None:
        """Add −(∂F/∂w_k)ᵀu, the first-order effect of leaving k out here, to the total of each row without k."""
        row, position = pairs
        add_rows(totals, row, self.weights[:, position].T, alpha=-1)


class Jumps(NamedTuple):
    """Γ of some rows, block by block: the coordinates of each block, and a function that computes Γ there."""

    blocks: list[Coordinates]
    of: Callable[[Coordinates], Slots]


class LinearStep:
    """The derivative of one step at its recorded state: with every example, and with each row's examples left out.

    ``path`` is applied to whatever reaches the step as a change of the batch gradient (a symmetric linear map, such as
    a projection; by default nothing). ``after`` is the recomputed step, F(s; w¹), to be compared with the recorded
    state; it computes a gradient if nothing else does.
    """

    def __init__(
        self, rule: Rule, recorded: RecordedStep, curvature: Curvature, path: Callable[[Params], Params] | None = None
    ) -> None:
        self._rule, self._recorded, self.curvature = rule, recorded, curvature
        self._path = path or (lambda params: params)
        self.hypers = recorded.record.hypers
        self._summed = False

    @property
    def has_gradient(self) -> bool:
        """Say whether the step can be recomputed without another gradient."""
        return self.curvature.has_gradient

    @cached_property
    def gradient(self) -> Params:
        """ḡ(θ; w¹): known already, or recovered from the recorded states up to rounding, or computed."""
        if not self.curvature.has_gradient and (used := self.consumed) is not None:
            return used
        return self.curvature.gradient

    @cached_property
    def consumed(self) -> Params | None:
        """The gradient that was used, if the recorded states tell, or None."""
        recorded = self._recorded
        return self._rule.consumed(recorded.before, recorded.after, self.hypers) if recorded.exact else None

    @cached_property
    def after(self) -> State:
        """The recomputed step."""
        return self._rule.step(self._recorded.before, self.curvature.gradient, self.hypers)

    def pull(
        self, vectors: State, products: Callable[[Params], tuple[Params, Float[Tensor, "vectors batch"]]] | None = None
    ) -> Pulled:
        """Compute ∂F(w¹)ᵀ·u for the state, for the batch gradient, and for each example's weight.

        ``products`` is used in place of the curvature's own if its values are known from elsewhere.
        """
        state, along = self._rule.cotangent(self._at(height(vectors[PARAM])), vectors, self.hypers)
        along = self._path(along)
        curved, reads = (products or self.curvature.products)(self._damped(along))
        if self._dampings:
            reads = self.curvature.reads(along)
        return Pulled(_plus(state, curved), state, along, reads, vectors, self)

    def push(self, vectors: State, pairs: Pairs) -> State:
        """Compute ∂F(w¹)·δ + γ: SGD-IE's step, with its examples' first-order effect. Overwrites the vectors."""
        missed = self._marked(vectors, pairs)
        return self._tangent(vectors, self._changes(vectors[PARAM], torch.ones_like(missed), -missed))

    def inject(self, pairs: Pairs, count: int) -> State:
        """Compute γ alone, for ``count`` rows."""
        if not self.curvature.separable:
            still = zeros(self._recorded.before, count)
            missed = self._marked(still, pairs)
            return self._tangent(
                still, self._path(self.curvature.changes(still[PARAM], torch.ones_like(missed), -missed))
            )
        affected, gradient = self._left_out(pairs)
        missing = gather_sums(each(torch.neg, gradient), affected, count)
        return self._tangent(zeros(self._recorded.before, count), missing)

    def push_corrected(self, vectors: State, pairs: Pairs, keep: Keep = None) -> State:
        """Compute ∂F(w^{−k})·δ + Γ: ACC's step, the counterfactual step linearised at the recorded state.

        Rows that are not kept take SGD-IE's step. Overwrites the vectors.
        """
        missed = self._marked(vectors, pairs)
        own_pairs = pairs if keep is None else _where(pairs, keep)
        without = missed if keep is None else self._marked(vectors, own_pairs)
        if self._rule.linear and self.curvature.separable:  # then Γ = γ, and one tangent serves all
            return self._tangent(vectors, self._changes(vectors[PARAM], 1 - without, -missed))
        along = self._changes(vectors[PARAM], 1 - without, without - missed)
        pushed = self._tangent(vectors, along)
        affected, gradient = self._left_out(own_pairs)
        if not len(affected):
            return pushed
        own = self._counterfactual(gradient)
        tangent = self._rule.tangent(own, (state_rows(vectors, affected), rows(along, affected)), self.hypers)
        jump = self._jump(own)
        return replace_rows(pushed, affected, {slot: each(torch.add, tangent[slot], jump[slot]) for slot in tangent})

    def pull_corrected(self, vectors: State, pairs: Pairs, keep: Keep = None) -> tuple[State, Float[Tensor, " rows"]]:
        """Compute ∂F(w^{−k})ᵀ·a_k for each row's own vector, and ⟨a_k, Γ_k⟩.

        Rows that are not kept are treated as in SGD-IE.
        """
        count = height(vectors[PARAM])
        reads = next(iter(vectors[PARAM].values())).new_zeros(count)
        state, along = self._rule.cotangent(self._at(count), vectors, self.hypers)
        if keep is not None:
            plain, gradient = self._left_out(_where(pairs, ~keep))
            reads[plain] = -inner_rows(rows(along, plain), gradient)
            pairs = _where(pairs, keep)
        affected, gradient = self._left_out(pairs)
        if len(affected):
            own = self._counterfactual(gradient)
            own_vectors = state_rows(vectors, affected)
            jump = self._jump(own)
            reads[affected] = sum(inner_rows(own_vectors[slot], jump[slot]) for slot in jump)
            if not self._rule.linear:
                own_state, own_along = self._rule.cotangent(own, own_vectors, self.hypers)
                state = replace_rows(state, affected, own_state)
                along = replace_rows({PARAM: along}, affected, {PARAM: own_along})[PARAM]
        along = self._path(along)
        without = self._marked(vectors, pairs)
        curved = self.curvature.changes(self._damped(along), 1 - without, torch.zeros_like(without))
        return _plus(state, curved), reads

    def jumps(self, pairs: Pairs) -> tuple[Int[Tensor, " affected"], Jumps]:
        """Return the rows with an example in this batch, and each Γ: the step without its examples minus the step.

        Γ comes in blocks, some coordinates of all rows, small enough to stay in the CPU cache while in use; coordinates
        that are zero because their gradient is may be left out.
        """
        affected, leaving = self._left_out(pairs)
        if not self._rule.by_coordinate:
            whole = self._jump(self._counterfactual(leaving))
            return affected, Jumps([Block(name) for name in leaving], lambda block: _slots(whole, block.name))
        leaving = each(Tensor.contiguous, leaving)
        rule, states, gradient = self._rule, (self._recorded.before, self.stepped), self.gradient

        def of(block: Coordinates) -> Slots:
            before, after = ({slot: block.of(state[slot]) for slot in rule.slots} for state in states)
            whole = block.of(gradient)
            return rule.jumped(
                block.name, (before, after), (whole, _rounded(whole, block.of_rows(leaving), before)), self.hypers
            )

        return affected, Jumps(list(blocks(leaving, BLOCK, rule.groups)), of)

    def _changes(
        self, vectors: Params, weights: Float[Tensor, "rows batch"], added: Float[Tensor, "rows batch"]
    ) -> Params:
        """Compute what reaches the step as C(Z; w)·δ + (1/|Z|) Σ ẇ_z g(z)."""
        if not self._dampings:
            return self._path(self.curvature.changes(vectors, weights, added))
        curved = self._damped(self.curvature.changes(vectors, weights, torch.zeros_like(added)))
        if not added.any():
            return self._path(curved)
        return self._path(each(torch.add, curved, self.curvature.shifts(vectors, added)))

    def _damped(self, change: Params) -> Params:
        """Return how much of a change of the batch gradient counts, if the gradient changes in leaps."""
        return {**change, **{name: change[name] * damping for name, damping in self._dampings.items()}}

    @cached_property
    def _dampings(self) -> Params:
        return dampings(self._rule, self._recorded) if self.curvature.leaps and self._rule.divides else {}

    def _marked(self, vectors: State, pairs: Pairs) -> Float[Tensor, "rows batch"]:
        """Return one where a row leaves out an example of the batch, zero elsewhere."""
        like = next(iter(vectors[PARAM].values()))
        marked = like.new_zeros((len(like), len(self._recorded.record.ids)))
        marked[pairs] = 1
        return marked

    def _at(self, count: int) -> tuple[State, Params]:
        # A linear step has the same derivative everywhere, so any gradient will do if none is known.
        gradient = self._recorded.before[PARAM] if self._rule.linear else self.gradient
        return expand(self._recorded.before, count), expand({PARAM: gradient}, count)[PARAM]

    def _tangent(self, state: State, gradient: Params) -> State:
        if self._rule.linear:  # it is its own derivative
            return self._rule.steps_(state, gradient, self.hypers)
        return self._rule.tangent(self._at(height(state[PARAM])), (state, gradient), self.hypers)

    def _counterfactual(self, gradient: Params) -> tuple[State, Params]:
        """Return the recorded state, and the batch gradient without each row's examples."""
        state, _ = self._at(height(gradient))
        whole = expand({PARAM: self.gradient}, height(gradient))[PARAM]
        if self._rule.linear:
            return state, each(torch.sub, whole, gradient)
        return state, {n: whole[n] - _rounded(whole[n], left, self._slots_of(n)) for n, left in gradient.items()}

    @cached_property
    def stepped(self) -> State:
        """The step with the gradient from which jumps are measured."""
        return self._rule.step(self._recorded.before, self.gradient, self.hypers)

    def _jump(self, own: tuple[State, Params]) -> State:
        """Compute Γ = O(s, ḡ without the row's examples) − O(s, ḡ)."""
        stepped = self._rule.steps(*own, self.hypers)
        return {slot: each(torch.sub, stepped[slot], self.stepped[slot]) for slot in stepped}

    def _left_out(self, pairs: Pairs) -> tuple[Int[Tensor, " affected"], Params]:
        """Return the rows with an example in this batch, and (1/|Z|) Σ g(z) over each one's examples, after ``path``.

        If examples depend on each other, it is the change of the batch gradient when these are removed.
        """
        affected, local = torch.unique(pairs[0], return_inverse=True)
        if not len(affected):
            return affected, self._nothing()
        if len(affected) == len(pairs[0]):  # one example per row: in the batch's own order
            affected, local = pairs[0], torch.arange(len(affected))
        if not self.curvature.separable:
            like = next(iter(self._recorded.before[PARAM].values()))
            marked = like.new_zeros((len(affected), len(self._recorded.record.ids)))
            marked[local, pairs[1]] = 1
            return affected, self._path(self.curvature.missing(marked))
        _, position = self._padded(pairs)
        shares = self.curvature.shares(position)
        if self._sensitive:
            self._sum_parts(shares, position)
        shares = _added(shares, local, len(affected))
        everyone = torch.bincount(local, minlength=len(affected)) == len(self._recorded.record.ids)
        if not self._rule.linear and everyone.any():  # a row that leaves out the whole batch leaves no gradient at all
            shares = {name: _with_rows(tensor, everyone, self.gradient[name]) for name, tensor in shares.items()}
        return affected, self._path(shares)

    @cached_property
    def _sensitive(self) -> list[str]:
        """The parameters with a moment that is still zero: a gradient's last digits can become a whole step there."""
        if self._rule.linear:
            return []
        return [name for name in self._rule.groups if _has_zeros(self._slots_of(name))]

    def _slots_of(self, name: str) -> Slots:
        return {slot: params[name] for slot, params in self._recorded.before.items() if name in params}

    def _sum_parts(self, shares: Params, position: Int[Tensor, " chosen"]) -> None:
        """Compute ḡ, once, as the sum of single examples' parts: without the only one that is not zero, it is zero.

        Only where the last digits matter. The parts at these positions are known.
        """
        if self._summed:
            return
        self._summed = True
        ids = self._recorded.record.ids
        place = torch.full((len(ids),), -1).scatter_(0, position, torch.arange(len(position)))
        once = torch.zeros(len(position)).index_fill_(0, place[place >= 0], 1.0)
        total = {name: torch.tensordot(once.to(shares[name]), shares[name], 1) for name in self._sensitive}
        others = (place < 0).nonzero()[:, 0]
        for part in others.split(len(position)) if len(others) else ():  # as many at a time as the rows asked for
            more = self.curvature.shares(part)
            total = {name: summed + more[name].sum(0) for name, summed in total.items()}
        # What else is in the gradient, such as new values of buffers, stays.
        self.gradient = {**self.gradient, **total}

    def _nothing(self) -> Params:
        params = self._recorded.before[PARAM]
        return {name: tensor.new_zeros((0, *tensor.shape)) for name, tensor in params.items()}

    def _padded(self, pairs: Pairs) -> tuple[Int[Tensor, " padded"], Int[Tensor, " padded"]]:
        """Repeat the last pair up to one of a few lengths, so that there are few shapes to trace."""
        row, position = pairs
        quantum = max(1, len(self._recorded.record.ids) // 8)
        more = -len(row) % quantum if len(row) != len(self._recorded.record.ids) else 0
        return torch.cat([row, row[-1:].expand(more)]), torch.cat([position, position[-1:].expand(more)])


def _added(terms: Params, local: Int[Tensor, " pairs"], count: int) -> Params:
    """Compute the sum of each row's terms; those beyond the pairs are padding."""
    actual = each(lambda tensor: tensor[: len(local)], terms)
    return actual if count == len(local) else gather_sums(actual, local, count)


def _with_rows(stack: Tensor, chosen: Bool[Tensor, " rows"], value: Tensor) -> Tensor:
    """Return a stack in which the chosen rows are this value."""
    return torch.where(chosen.view(-1, *[1] * value.ndim), value, stack)


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
