"""What the jump costs on images: compared with SGD-IE, and for few and many examples."""

from __future__ import annotations

from leaveout.estimators import ACC, SGDIE
from leaveout.paper.bench.problems import QUIET, images, quickest
from leaveout.paper.bench.table import Row

STEPS = 20


def jumps() -> list[Row]:
    """Compare the jump with SGD-IE on the MNIST network trained with AdamW, and its step for few and many examples."""
    _, many = _timed(10_000)
    sgdie, acc = _timed(1_280)
    how = f"{STEPS} steps of 64, AdamW: SGD-IE {sgdie:.2f} s, ACC(jump) {acc:.2f} s, the quickest of four each"
    flat = f"the same, {acc / STEPS * 1e3:.1f} and {many / STEPS * 1e3:.1f} ms per step"
    return [
        Row("ACC(jump) / SGD-IE, MNIST CNN", acc / sgdie, "<=", 1.5, how),
        Row("ACC(jump), a step at n = 10,000 / at n = 1,280", many / acc, "<=", 1.2, flat),
    ]


def _timed(n: int) -> tuple[float, float]:
    """Return the seconds that SGD-IE and the jump take over the first steps of a run on n images."""
    dataset, task, whole = images(n, 1, adam=True)
    run = whole.head(STEPS)
    sgdie, acc = quickest(
        4,
        lambda: SGDIE().score(run, task, dataset.val, resources=QUIET),
        lambda: ACC().score(run, task, dataset.val, resources=QUIET),
    )
    return sgdie, acc


CASES = (jumps,)
