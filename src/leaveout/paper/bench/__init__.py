"""Benchmarks of speed and fidelity, as ratios measured in one run on the machine at hand."""

from leaveout.paper.bench.cases import CASES
from leaveout.paper.bench.problems import CLOCKS
from leaveout.paper.bench.table import Row, run_cases, write

__all__ = ["CASES", "CLOCKS", "Row", "run_cases", "write"]
