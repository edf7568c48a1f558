"""The choices that define an estimator: curvature, gradient, readout; and how shared sweeps turn them into scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from leaveout._util.trees import PARAM, Params
from leaveout.diff.hessian import Hessian
from leaveout.diff.operator import StepOperator
from leaveout.errors import InputError
from leaveout.estimators.readout import Projected, readout_of
from leaveout.estimators.request import Request, Swept
from leaveout.sweep import budget
from leaveout.sweep.fast_acc import Products, corrected_gradient, remainders
from leaveout.sweep.free_transport import Layout, sketch
from leaveout.sweep.jump import jump_products
from leaveout.sweep.kink_size import hessian
from leaveout.sweep.saturation import PARTS
from leaveout.sweep.schedule import Schedule
from leaveout.sweep.sweep import ALWAYS, Sweep
from leaveout.sweep.transports import Subspace

DIRECTIONS = ("auto", "forward", "backward")
KINKS: dict[bool | str, str | None] = {False: None, True: "kinks", "auto": "kinks auto"}
"""Whether the Hessian has the curvature of kinks, as worded in a method's name."""


@dataclass(frozen=True)
class Choice:
    """What an estimator computes.

    Args:
        kind: the curvature that transports vectors from step to step.
        readout: ``"linear"``, ``"outputs"`` or ``"exact"``.
        direction: ``"forward"``, ``"backward"``, or the cheaper one.
        transport: how the displacement that corrects the gradient is transported; None: the plain gradient is read.
        sketch: the width of the random projection in which remainders are stored, if any.
        schedule: where the correction is applied.
        project: the width of the random projection applied to gradients, if any.
        kinks: whether the Hessian has the curvature of kinks; ``"auto"``: if it can help for the run.
        together: for jumps, a group's examples leave a batch together; otherwise the jumps of its examples are added.
        saturated: for jumps, see ``sweep/saturation.py``.
    """

    kind: type[StepOperator]
    readout: str = "linear"
    direction: str = "auto"
    transport: str | Subspace | None = None
    sketch: int | None = None
    schedule: Schedule = ALWAYS
    project: int | None = None
    kinks: bool | str = False
    together: bool = True
    saturated: bool = True

    def __post_init__(self) -> None:
        readout_of(self.readout)
        if self.kinks not in tuple(KINKS):
            raise InputError(f"kinks={self.kinks!r} is unknown: use True, False or 'auto'.", code="kinks-unknown")
        if self.direction not in DIRECTIONS:
            raise InputError(
                f"direction={self.direction!r} is unknown: use 'auto', 'forward' or 'backward'.",
                code="direction-unknown",
            )
        if self.transport not in (None, "auto", "free", "jump", "exact") and not isinstance(self.transport, Subspace):
            raise InputError(
                f"transport={self.transport!r} is unknown: use 'free', 'subspace', 'jump' or 'exact'.",
                code="transport-unknown",
            )
        free = self.transport in ("auto", "free") and self.direction != "forward"
        if self.sketch is not None and not (free and self.sketch > 0):
            raise InputError(
                "sketch takes a positive width, with transport='free' and without direction='forward'.",
                code="sketch-not-usable",
            )
        if self.project is not None and self.project < 1:
            raise InputError(
                f"project={self.project} is not a width: give the number of values kept of each gradient.",
                code="project-not-a-width",
            )
        if self.project is not None and self.transport not in (None, "exact"):
            raise InputError(
                "project= works only with the exact transport: add transport='exact', or leave it out.",
                code="project-needs-exact",
            )

    def values(self, request: Request) -> tuple[Tensor, Params | None]:
        """Compute the scores, and the displacements if requested."""
        self.schedule.check(request.trajectory.run)
        if self.transport in (None, "exact"):
            return self._swept(request)
        return self.scores(request).corrected, None

    def scores(self, request: Request) -> Products:
        """Compute the plain and the corrected scores by one cheap sweep, in the cheaper order."""
        readout = self._projected(request)
        sweep = Sweep(request.trajectory, self._curvature(request), schedule=self.schedule)
        if self.transport == "jump":
            if self.direction == "forward":
                raise InputError(
                    "Jumps are read by a backward sweep: leave direction at 'auto'.", code="direction-fixed"
                )
            jumps = partial(jump_products, sweep, together=self.together, saturated=self.saturated)
            moments = len(PARTS) * budget.param_bytes(request.trajectory)
            vector = budget.backward_bytes(request.trajectory) + moments
            return Products(**request.columns(jumps, readout, vector_bytes=vector))
        subspace = self.transport if isinstance(self.transport, Subspace) else None
        if self.direction == "backward" and subspace:
            raise InputError("Subspace transport goes forward: leave direction at 'auto'.", code="direction-fixed")
        alone = self.sketch is not None or readout.count(request.query) == 1
        backward = not subspace and (self.direction == "backward" or (self.direction == "auto" and alone))
        corrected: Swept = partial(remainders, sweep, width=self.sketch)
        if not backward:
            corrected = partial(corrected_gradient, sweep, subspace=subspace)
        return Products(**request.columns(corrected, readout, alone=backward))

    def _curvature(self, request: Request) -> type[StepOperator]:
        return hessian(self.kinks, request.trajectory) if self.kind is Hessian else self.kind

    def _projected(self, request: Request) -> Projected:
        readout = readout_of(self.readout)
        if request.displacements or not isinstance(readout, Projected):
            raise InputError(
                "Displacements and the exact readout need each example's final displacement, which cheap transports do "
                "not have: use transport='exact', or readout='outputs'.",
                code="readout-needs-exact",
            )
        return readout

    def _swept(self, request: Request) -> tuple[Tensor, Params | None]:
        """Compute scores by a sweep with the whole step, forward or backward: the cheaper unless one is requested."""
        readout, corrected = readout_of(self.readout), self.transport is not None
        sweep = Sweep(request.trajectory, self._curvature(request), corrected, self.schedule, self._path(request))

        def pushed(shard: Request) -> tuple[Tensor, Params | None]:
            moved = shard.trajectory.scored(sweep.displacements(shard.left_out, shard.resources, shard.cost))
            return readout.of_displacements(shard.query, moved), moved if shard.displacements else None

        forward = self.direction == "forward" or request.displacements or not isinstance(readout, Projected)
        if forward and self.direction == "backward":
            raise InputError(
                "Displacements and the exact readout go forward: leave direction at 'auto'.", code="direction-fixed"
            )
        # Backward needs a vector per query, forward one per row; the corrected step needs one per row either way.
        if isinstance(readout, Projected) and not forward:
            cheaper = corrected or readout.count(request.query) > len(request.left_out)
            if self.direction == "backward" or not cheaper:
                return request.columns(sweep.inner_products, readout)["products"], None
        return request.rows(pushed, budget.forward_bytes(request.trajectory), "forward")

    def _path(self, request: Request) -> Callable[[Params], Params] | None:
        """Return the map g ↦ ΦᵀΦg: whatever depends on gradients then depends only on their projections Φg."""
        if self.project is None:
            return None
        params = request.trajectory.final()[PARAM]
        layout = Layout(request.trajectory.rule, params)
        project = sketch(layout, self.project, next(iter(params.values())))
        return lambda stack: layout.unflatten(project.back(project(layout.flatten(stack))))
