"""One small file an estimator: its formula, and the choices it makes of the shared sweep."""

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
