"""Optimizer steps as pure functions, one file per optimizer, and their derivatives.

A new optimizer is one new file here, with a subclass of ``definition.Definition`` and its instance ``OPTIMIZER``.
"""

from leaveout.optim.averaging import AVERAGE
from leaveout.optim.definition import IDLE, STILL, Definition, Hyper, Slots
from leaveout.optim.reading import HyperReader, Settings, buffers, rule_of, unwrapped
from leaveout.optim.registry import optimizers
from leaveout.optim.rule import Rule, values

__all__ = [
    "AVERAGE",
    "IDLE",
    "STILL",
    "Definition",
    "Hyper",
    "HyperReader",
    "Rule",
    "Settings",
    "Slots",
    "buffers",
    "optimizers",
    "rule_of",
    "unwrapped",
    "values",
]
