"""How scores are measured: agreement with exact ones, and the field's protocols for comparing methods.

>>> sorted(set(__all__) & {"auc", "kendall", "lds", "tsloo"})
['auc', 'kendall', 'lds', 'tsloo']
"""

from leaveout.evaluate.metrics.agreement import (
    Agreement,
    Interval,
    bootstrap,
    compare,
    jaccard,
    jaccard_magnitude,
    kendall,
    repeatability,
    rmse,
    spearman,
)
from leaveout.evaluate.metrics.brittle import Brittleness, brittleness
from leaveout.evaluate.metrics.detection import auc, average_precision
from leaveout.evaluate.metrics.linear_datamodel import algorithm_lds, lds, random_subsets
from leaveout.evaluate.metrics.per_query import PerQuery
from leaveout.evaluate.metrics.trajectory_loo import tsloo

__all__ = [
    "Agreement",
    "Brittleness",
    "Interval",
    "PerQuery",
    "algorithm_lds",
    "auc",
    "average_precision",
    "bootstrap",
    "brittleness",
    "compare",
    "jaccard",
    "jaccard_magnitude",
    "kendall",
    "lds",
    "random_subsets",
    "repeatability",
    "rmse",
    "spearman",
    "tsloo",
]
