"""The product of one vector with a batch's curvature, together with every example's gradient: one pass for both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jvp, vmap

from leaveout._util.trees import Params, each
from leaveout.task.batches import Batch
from leaveout.task.calls import run
from leaveout.task.rewrites.elementary import Elementary
from leaveout.task.rewrites.missing_rules import quiet_loops
from leaveout.task.training_batch import size_of

if TYPE_CHECKING:
    from leaveout.task.task import Task


def directional_by_example(
    task: Task, params: Params, batch: Batch, vector: Params
) -> tuple[Params, Float[Tensor, " batch"], Params]:
    """Compute Jᵀ·u, ⟨u, g(z)⟩/|Z| and g(z)/|Z| for one vector u and every example z of a batch.

    The losses' derivatives along u are linear in u. If each example is given its own copy of u, the gradient of their
    sum with respect to these copies is each example's gradient. It takes one more matrix product per layer than Jᵀ·u.
    """
    size = size_of(batch)

    def products(p: Params, b: Batch, v: Params) -> tuple[Params, Tensor, Params]:
        def along(q: Params, stack: Params) -> tuple[Tensor, Tensor]:
            def one(example: Batch, copy: Params) -> Tensor:
                return jvp(lambda r: task.example_loss({**p, **r}, example), (q,), (copy,))[1]

            slopes = vmap(one)(b, stack) / size
            return slopes.sum(), slopes

        stack = each(lambda t: t.expand(size, *t.shape), v)
        with Elementary(), quiet_loops():
            (curved, gradients), slopes = grad(along, (0, 1), has_aux=True)(task.variables(p), stack)
        return curved, slopes, each(Tensor.contiguous, gradients)

    return run(task, "directional_by_example", products, params, batch, vector)
