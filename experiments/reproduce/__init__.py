"""The published tables and curves as declarative specs, one file each, and one runner for all of them."""

from experiments.reproduce.adam import ADAM
from experiments.reproduce.adam_kinks import ADAM_KINKS
from experiments.reproduce.bounds import BOUNDS
from experiments.reproduce.ceiling import CEILING
from experiments.reproduce.choosing import CHOOSING
from experiments.reproduce.cleansing import CLEANSING, CLEANSING_FULL
from experiments.reproduce.epochs import EPOCHS
from experiments.reproduce.family import FAMILY, METHODS
from experiments.reproduce.groups import GROUPS
from experiments.reproduce.kinks import KINKS
from experiments.reproduce.labels import LABELS
from experiments.reproduce.lds import LDS
from experiments.reproduce.mismatch import MISMATCH
from experiments.reproduce.readouts import READOUTS
from experiments.reproduce.removal import REMOVAL
from experiments.reproduce.sensitivity import SENSITIVITY
from experiments.reproduce.smoothness import SMOOTHNESS
from experiments.reproduce.spec import Settings, Spec
from experiments.reproduce.tables import CONVEX, NONCONVEX
from experiments.reproduce.tsloo import TSLOO

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
