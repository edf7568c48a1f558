"""The published tables and curves as declarative specs, one file each, and one runner for all of them."""

from leaveout.paper.reproduce.adam import ADAM
from leaveout.paper.reproduce.adam_kinks import ADAM_KINKS
from leaveout.paper.reproduce.bounds import BOUNDS
from leaveout.paper.reproduce.ceiling import CEILING
from leaveout.paper.reproduce.choosing import CHOOSING
from leaveout.paper.reproduce.cleansing import CLEANSING, CLEANSING_FULL
from leaveout.paper.reproduce.epochs import EPOCHS
from leaveout.paper.reproduce.family import FAMILY, METHODS
from leaveout.paper.reproduce.groups import GROUPS
from leaveout.paper.reproduce.kinks import KINKS
from leaveout.paper.reproduce.labels import LABELS
from leaveout.paper.reproduce.lds import LDS
from leaveout.paper.reproduce.mismatch import MISMATCH
from leaveout.paper.reproduce.readouts import READOUTS
from leaveout.paper.reproduce.removal import REMOVAL
from leaveout.paper.reproduce.sensitivity import SENSITIVITY
from leaveout.paper.reproduce.smoothness import SMOOTHNESS
from leaveout.paper.reproduce.spec import Settings, Spec
from leaveout.paper.reproduce.tables import CONVEX, NONCONVEX
from leaveout.paper.reproduce.tsloo import TSLOO

SPECS = {
    spec.name: spec
    for spec in (
        *(CONVEX, NONCONVEX, FAMILY, METHODS, SENSITIVITY, EPOCHS, GROUPS, BOUNDS),
        *(
            READOUTS,
            CLEANSING,
            CLEANSING_FULL,
            MISMATCH,
            LABELS,
            REMOVAL,
            SMOOTHNESS,
            CEILING,
            CHOOSING,
            TSLOO,
            LDS,
            KINKS,
            ADAM,
            ADAM_KINKS,
        ),
    )
}

__all__ = ["SPECS", "Settings", "Spec"]
