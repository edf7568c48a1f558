"""Which training examples made your model what it is, and what would it be without them?"""

from leaveout import data, metrics, models
from leaveout.carriers import Subspace
from leaveout.cleanse import Curve, cleanse
from leaveout.engine import Local, Ray
from leaveout.errors import (
    EngineError,
    InputError,
    LeaveoutError,
    LeaveoutWarning,
    MismatchError,
    RunError,
    UnsupportedError,
)
from leaveout.estimators import ACC, SGDIE, AdamIE, DVEmb, Estimator, InfluenceFunction, Replay, TracIn, score
from leaveout.plan import plan
from leaveout.recorder import Recorder
from leaveout.refine import refine
from leaveout.report import Show, report
from leaveout.resources import Cost, Resources
from leaveout.rounding import Rounding, rounding
from leaveout.scores import Scores
from leaveout.store import Run, check_run, open_run
from leaveout.task import Task
from leaveout.timeline import Timeline, timeline
from leaveout.train import train
from leaveout.verify import Check, verify

__all__ = [
    "ACC",
    "SGDIE",
    "AdamIE",
    "Check",
    "Cost",
    "Curve",
    "DVEmb",
    "EngineError",
    "Estimator",
    "InfluenceFunction",
    "InputError",
    "LeaveoutError",
    "LeaveoutWarning",
    "Local",
    "MismatchError",
    "Ray",
    "Recorder",
    "Replay",
    "Resources",
    "Rounding",
    "Run",
    "RunError",
    "Scores",
    "Show",
    "Subspace",
    "Task",
    "Timeline",
    "TracIn",
    "UnsupportedError",
    "check_run",
    "cleanse",
    "data",
    "metrics",
    "models",
    "open_run",
    "plan",
    "refine",
    "report",
    "rounding",
    "score",
    "timeline",
    "train",
    "verify",
]
