"""What the jump costs on images: compared with SGD-IE, and for few and many examples."""

from __future__ import annotations

from functools import partial

from experiments.bench.problems import QUIET, images, quickest
from experiments.bench.table import Row
from leaveout.estimators import ACC, SGDIE, Estimator

STEPS = 20


def jumps() -> list[Row]:
    """Compare the jump with SGD-IE and with kinks on the MNIST network, AdamW; its step for few and many examples."""
    (many,) = _timed(10_000, ACC())
    sgdie, acc, bent = _timed(1_280, SGDIE(), ACC(), ACC(kinks=True))
    how = f"{STEPS} steps of 64, AdamW: SGD-IE {sgdie:.2f} s, ACC(jump) {acc:.2f} s, the quickest of four each"
    flat = f"the same, {acc / STEPS * 1e3:.1f} and {many / STEPS * 1e3:.1f} ms per step"
    return [
        Row("ACC(jump) / SGD-IE, MNIST CNN", acc / sgdie, "<=", 1.5, how),
        Row("ACC(jump), a step at n = 10,000 / at n = 1,280", many / acc, "<=", 1.2, flat),
        Row("ACC(jump) with kinks / without, MNIST CNN", bent / acc, "<=", 1.5, f"the same, {bent:.2f} s with kinks"),
    ]


def _timed(n: int, *methods: Estimator) -> list[float]:
    """Return the seconds that methods take over the first steps of a run on n images."""
    dataset, task, whole = images(n, 1, adam=True)
    run = whole.head(STEPS)
    return quickest(4, *(partial(method.score, run, task, dataset.val, resources=QUIET) for method in methods))


CASES = (jumps,)
