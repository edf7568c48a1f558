"""Benchmarks of speed and fidelity, as ratios measured in one run on the machine at hand."""

from experiments.bench.cases import CASES
from experiments.bench.problems import CLOCKS
from experiments.bench.table import Row, run_cases, write

__all__ = ["CASES", "CLOCKS", "Row", "run_cases", "write"]
