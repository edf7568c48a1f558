"""What the jump costs on images: beside SGD-IE, and for few and many examples."""

from __future__ import annotations

from leaveout.estimators import ACC, SGDIE
from leaveout.paper.bench.problems import QUIET, images, quickest
from leaveout.paper.bench.table import Row

STEPS = 20


def image_jumps() -> list[Row]:
    """Compare the jump with SGD-IE on the MNIST network trained by AdamW, and its step at two numbers of examples."""
    each = {}
    for n in (10_000, 1_280):
        dataset, task, whole = images(n, 1, adam=True)
        run = whole.head(STEPS)
        sgdie, acc = quickest(
            4,
            lambda run=run, task=task, val=dataset.val: SGDIE().score(run, task, val, resources=QUIET),
            lambda run=run, task=task, val=dataset.val: ACC().score(run, task, val, resources=QUIET),
        )
        each[n] = acc / STEPS
    how = f"{STEPS} steps of 64, AdamW: SGD-IE {sgdie:.2f} s, ACC(jump) {acc:.2f} s, the quickest of four each"
    flat = f"the same, {each[1_280] * 1e3:.1f} and {each[10_000] * 1e3:.1f} ms per step"
    return [
        Row("ACC(jump) / SGD-IE, MNIST CNN", acc / sgdie, "<=", 1.5, how),
        Row("ACC(jump), a step at n = 10,000 / at n = 1,280", each[10_000] / each[1_280], "<=", 1.2, flat),
    ]


CASES = (image_jumps,)
