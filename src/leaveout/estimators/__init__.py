"""One small file per estimator: its formula, and how it uses the shared sweep."""

from leaveout.estimators.acc import ACC
from leaveout.estimators.adamie import AdamIE
from leaveout.estimators.base import Estimator
from leaveout.estimators.dvemb import DVEmb
from leaveout.estimators.influence import InfluenceFunction
from leaveout.estimators.replay import Replay
from leaveout.estimators.several import score
from leaveout.estimators.sgdie import SGDIE
from leaveout.estimators.tracin import TracIn

__all__ = ["ACC", "SGDIE", "AdamIE", "DVEmb", "Estimator", "InfluenceFunction", "Replay", "TracIn", "score"]
