"""Which training examples made your model what it is, and what would it be without them?"""

from leaveout.builtin import data, models
from leaveout.compute.cost import Cost
from leaveout.compute.engines import Local, Ray
from leaveout.compute.resources import Resources
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
from leaveout.estimators.timeline import Timeline, timeline
from leaveout.evaluate import metrics
from leaveout.evaluate.cleanse import Curve, cleanse
from leaveout.evaluate.plan import plan
from leaveout.evaluate.precision import Rounding, rounding
from leaveout.evaluate.refine import refine
from leaveout.evaluate.verify import Check, verify
from leaveout.reporting import Show, report
from leaveout.run.reader import Run, check_run, open_run
from leaveout.run.recorder import Recorder
from leaveout.run.train import train
from leaveout.scores import Scores
from leaveout.sweep.transports import Subspace
from leaveout.task.task import Task

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
