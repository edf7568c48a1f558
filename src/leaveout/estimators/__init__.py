"""One small file an estimator: its formula, and the choices it makes of the shared sweep."""

from leaveout.estimators.acc import ACC
from leaveout.estimators.base import Estimator
from leaveout.estimators.replay import Replay
from leaveout.estimators.sgdie import SGDIE
from leaveout.estimators.together import score
from leaveout.estimators.tracin import TracIn

__all__ = ["ACC", "SGDIE", "Estimator", "Replay", "TracIn", "score"]
