"""Seeded corruption of training examples, with a record of which ones changed.

Every function returns new examples with the same ids; the given ones stay unchanged.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from leaveout.builtin.data.examples import Examples
from leaveout.errors import InputError, check_seed


@dataclass(frozen=True)
class Noisy:
    """Examples after noise; `touched` says for each row whether it differs from the row before."""

    examples: Examples
    touched: Bool[Tensor, " n"]


def gaussian(examples: Examples, sigma: float, seed: int = 0) -> Noisy:
    """Add N(0, σ²) to every feature, in the unit of the features as they were loaded."""
    if not 0 <= sigma < float("inf"):
        raise InputError(f"sigma={sigma} must be a finite number, 0 or more.", code="sigma-out-of-range")
    x = examples.x
    return _with_x(examples, x + sigma * torch.randn(x.shape, generator=_generator(seed), dtype=x.dtype))


def ones(examples: Examples, fraction: float, seed: int = 0) -> Noisy:
    """Set a fraction of each row's entries to 1: words that the message does not contain."""
    flat = examples.x.flatten(1)
    count = _count(fraction, flat.shape[1])
    # The positions of the `count` largest of independent uniforms are a sample without replacement, row by row.
    places = torch.rand(flat.shape, generator=_generator(seed)).topk(count, dim=1).indices
    return _with_x(examples, flat.scatter(1, places, 1.0).reshape(examples.x.shape))


def flip(examples: Examples, fraction: float, seed: int = 0) -> Noisy:
    """Give a fraction of the examples another label, drawn uniformly from the other classes that occur."""
    y, generator = examples.y, _generator(seed)
    classes, codes = y.unique(return_inverse=True)
    if len(classes) < 2:
        raise InputError("labels can only be flipped where at least two classes occur.", code="one-class-only")
    rows = torch.randperm(len(y), generator=generator)[: _count(fraction, len(y))]
    shift = torch.randint(1, len(classes), (len(rows),), generator=generator)
    flipped = y.clone()
    flipped[rows] = classes[(codes[rows] + shift) % len(classes)]
    true = y if examples.true is None else examples.true
    return Noisy(Examples(examples.x, flipped, examples.ids, raw=examples.raw, true=true), flipped != y)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(check_seed(seed))


def _count(fraction: float, n: int) -> int:
    if not 0 <= fraction <= 1:
        raise InputError(f"fraction={fraction} must lie between 0 and 1.", code="fraction-out-of-range")
    return round(fraction * n)


def _with_x(examples: Examples, x: Tensor) -> Noisy:
    changed = Examples(x, examples.y, examples.ids, raw=examples.raw, true=examples.true)
    return Noisy(changed, (x != examples.x).flatten(1).any(1))
