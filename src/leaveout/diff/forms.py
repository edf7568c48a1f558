"""The ways in which PyTorch can take a second derivative, and which of them are correct for an objective.

The product wanted is the one with J = ∂ḡ/∂θ, the derivative of the gradient *as training computes it*. Without
stop-gradients J is the Hessian, and symmetric. Each way differentiates twice, in forward mode (a derivative along a
vector) or in reverse (a gradient), and each relies on different formulas in PyTorch, some of which are wrong: the
reverse derivative of the forward formula of ``layer_norm`` is one. So no form is used unless it has been compared with
finite differences of the gradient itself (``leaveout.task.guard``).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from leaveout.errors import UnsupportedError


class Form(Enum):
    """How a product with J or its transpose is computed."""

    REVERSE_FORWARD = "the gradient of the losses' derivative along v"
    FORWARD_REVERSE = "the derivative of the gradient along v"
    REVERSE_REVERSE = "the pull-back of v through the gradient"
    THROUGH = "the derivative of the gradient along v, which stop-gradients stop once and not twice"
    TRANSPOSED = "the pull-back of v through v ↦ THROUGH"


COUPLED = "BatchNorm in training mode ties the examples of a batch together"
"""Why forms of single examples are missing under BatchNorm."""


class Abilities(NamedTuple):
    """What can be computed with a task's operations, and by which form; None if no form is correct.

    Args:
        vmap: many examples at once; otherwise one after the other.
        stacks: many models at once.
        forward: derivatives of the outputs along a vector.
        outer: products with the Gauss-Newton and Fisher matrices.
        reads: inner products with per-example gradients, as derivatives in the examples' weights.
        slopes: the same, as derivatives of the examples' losses along a vector, without any gradient.
        vector: Jᵀ·u of a batch for one vector.
        vectors: Jᵀ·u of a batch for a stack of vectors.
        changes: J(w)·v of a batch, each row with its own weights.
        example: J·v of every example.
        together: Jᵀ·u of a batch for one vector with every example's gradient, in one pass.
        symmetric: whether J is its own transpose; with stop-gradients it is not.
        hidden: whether gradients are stopped on the way to the loss, with or without an effect on these examples.
        stops: whether stop-gradients must be ignored to get the derivative of the loss itself.
        slope: whether that derivative is correct.
        reason: why a form is missing.
    """

    vmap: bool = False
    stacks: bool = False
    forward: bool = False
    outer: bool = False
    reads: bool = False
    slopes: bool = False
    vector: Form | None = None
    vectors: Form | None = None
    changes: Form | None = None
    example: Form | None = None
    together: bool = False
    symmetric: bool = True
    hidden: bool = False
    stops: bool = False
    slope: bool = True
    reason: str = ""

    @property
    def whole(self) -> bool:
        """Say whether everything can be computed, by whichever form."""
        return bool(self.vector and self.vectors and self.changes and self.example and self.outer and self.slope)


VECTOR = (Form.REVERSE_FORWARD, Form.FORWARD_REVERSE, Form.REVERSE_REVERSE, Form.TRANSPOSED)
VECTORS = (Form.REVERSE_REVERSE, Form.FORWARD_REVERSE, Form.TRANSPOSED)
CHANGES = (Form.FORWARD_REVERSE, Form.REVERSE_REVERSE, Form.THROUGH)
EXAMPLE = (Form.FORWARD_REVERSE, Form.REVERSE_REVERSE, Form.THROUGH)
FOLLOWING = (Form.TRANSPOSED, Form.THROUGH)
"""The forms that each kind of product can take, the fastest first; and those that are right with any stop-gradients."""


def no_form(reason: str) -> UnsupportedError:
    """Return the error for a method that needs a second derivative which no form can compute."""
    if reason == COUPLED:
        return UnsupportedError(
            f"{COUPLED}, so that there is no gradient of one of them alone, which this method needs: use SGDIE(), "
            "TracIn(), ACC(), ACC(transport='exact') or Replay().",
            code="examples-coupled",
        )
    return UnsupportedError(
        f"The derivative of this task's gradient cannot be computed: {reason}. TracIn() and Replay() need none.",
        code="derivative-not-available",
    )
