"""How far a change of the gradient moves a step that divides by a root, if the gradient changes in leaps, as at kinks.

Adam moves a coordinate by ``size · m / (√v + ε)``, so a change d of its gradient counts as d/√v. This holds for changes
that are small compared with √v. The curvature of kinks stands for leaps: an example crosses a kink, and its whole
gradient at that unit comes or goes. In coordinates that few examples use, such as the weights of a pixel that is mostly
empty, √v is much smaller than a leap, and vectors carried with d/√v grow without bound. A leap of size κ counts as

    d/√(v + κ²) = √(v/(v + κ²)) · d/√v,        κ² = LEAP² · (mean of v over the parameter)
"""

from __future__ import annotations

from leaveout._util.trees import Params
from leaveout.optim import Rule
from leaveout.trajectory.recorded_step import RecordedStep

LEAP = 0.3
"""κ over the root mean square of a parameter's gradients."""


def dampings(rule: Rule, recorded: RecordedStep) -> Params:
    """Compute √(v/(v + κ²)) for every parameter whose step divides by the root of v.

    It is 0 for a parameter without any gradient so far.
    """
    divisions = rule.divisions(recorded.record.hypers)
    factors: Params = {}
    for name, group in rule.groups.items():
        if (division := divisions[group]) is not None:
            square = recorded.after[division.square][name]
            factors[name] = (square / (square + LEAP**2 * square.mean())).nan_to_num_(0.0).sqrt_()
    return factors
