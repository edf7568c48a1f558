"""Which training examples made your model what it is, and what would it be without them?

Names are imported when they are first used, so that ``import leaveout`` takes almost no time.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from leaveout._util.extras import needed_by

if TYPE_CHECKING:
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
    from leaveout.evaluate.average import average
    from leaveout.evaluate.check import Check
    from leaveout.evaluate.choose import Chosen, choose
    from leaveout.evaluate.cleanse import cleanse
    from leaveout.evaluate.curve import Curve
    from leaveout.evaluate.label_issues import Labels
    from leaveout.evaluate.labels import labels
    from leaveout.evaluate.plan import plan
    from leaveout.evaluate.precision import Rounding, rounding
    from leaveout.evaluate.refine import refine
    from leaveout.evaluate.smoothness import Smoothness, smoothness
    from leaveout.evaluate.verify import verify
    from leaveout.reporting import Show
    from leaveout.run.checking import check_run
    from leaveout.run.reader import Run, open_run
    from leaveout.run.recording.recorder import Recorder
    from leaveout.run.train import train
    from leaveout.scores import Scores
    from leaveout.study import Study
    from leaveout.study.report import report
    from leaveout.sweep.transports import Subspace
    from leaveout.task.task import Task

_HOMES = {
    "builtin": ("data", "models"),
    "compute.cost": ("Cost",),
    "compute.engines": ("Local", "Ray"),
    "compute.resources": ("Resources",),
    "errors": (
        "EngineError",
        "InputError",
        "LeaveoutError",
        "LeaveoutWarning",
        "MismatchError",
        "RunError",
        "UnsupportedError",
    ),
    "estimators": (
        "ACC",
        "SGDIE",
        "AdamIE",
        "DVEmb",
        "Estimator",
        "InfluenceFunction",
        "Replay",
        "TracIn",
        "score",
    ),
    "estimators.timeline": ("Timeline", "timeline"),
    "evaluate": ("metrics",),
    "evaluate.average": ("average",),
    "evaluate.choose": ("Chosen", "choose"),
    "evaluate.cleanse": ("cleanse",),
    "evaluate.curve": ("Curve",),
    "evaluate.label_issues": ("Labels",),
    "evaluate.labels": ("labels",),
    "evaluate.plan": ("plan",),
    "evaluate.precision": ("Rounding", "rounding"),
    "evaluate.refine": ("refine",),
    "evaluate.smoothness": ("Smoothness", "smoothness"),
    "evaluate.check": ("Check",),
    "evaluate.verify": ("verify",),
    "reporting": ("Show",),
    "run.checking": ("check_run",),
    "run.reader": ("Run", "open_run"),
    "run.recording.recorder": ("Recorder",),
    "run.train": ("train",),
    "scores": ("Scores",),
    "study": ("Study",),
    "study.report": ("report",),
    "sweep.transports": ("Subspace",),
    "task.task": ("Task",),
}
"""The module of each public name."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = version("leaveout")
__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'leaveout' has no attribute {name!r}")
    with needed_by(f"lo.{name}"):
        home = import_module(f"leaveout.{_HOME_OF[name]}")
        value = getattr(home, name, None)
        globals()[name] = import_module(f"{home.__name__}.{name}") if value is None else value
    return globals()[name]


def __dir__() -> list[str]:
    return __all__
