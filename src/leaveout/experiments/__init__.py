"""The published tables and curves as declarative specs, a file each, and one runner for all of them."""

from leaveout.experiments.bounds import BOUNDS
from leaveout.experiments.cleansing import CLEANSING, CLEANSING_FULL
from leaveout.experiments.epochs import EPOCHS
from leaveout.experiments.family import FAMILY, METHODS
from leaveout.experiments.groups import GROUPS
from leaveout.experiments.mismatch import MISMATCH
from leaveout.experiments.readouts import READOUTS
from leaveout.experiments.sensitivity import SENSITIVITY
from leaveout.experiments.spec import Settings, Spec
from leaveout.experiments.tables import CONVEX, NONCONVEX

SPECS = {
    spec.name: spec
    for spec in (
        *(CONVEX, NONCONVEX, FAMILY, METHODS, SENSITIVITY, EPOCHS, GROUPS, BOUNDS),
        *(READOUTS, CLEANSING, CLEANSING_FULL, MISMATCH),
    )
}

__all__ = ["SPECS", "Settings", "Spec"]
