"""Runs the cases, and writes what they measured as JSON and as a table."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from leaveout._util.files import write_text

HEAD = """# Benchmarks

Measured by `python -m experiments bench` (or `make bench`) with the real data sets (`LEAVEOUT_DATA`). ACC is
accumulative SGD-influence estimation, SGD-IE is SGD-influence estimation ([methods](methods.md)). Every figure is a
ratio of two things measured in the same run, or a rank correlation; "meets" compares it with its target. A case can be
measured alone (`--only`) and then replaces its own rows, so not all rows are from the same day. For very long and very
wide runs see [load](load.md); for a whole data set, [all of MNIST](mnist.md).

"""

NOTES = """
## Close to their targets

Some ratios are so close to their targets that on two shared cores one run meets them and the next does not. The machine
also has a fast and a slow mode of elementwise work, a factor of two for minutes at a time.

*Replay / plain loops*: 0.0170 to 0.0255, the latter on a processor that runs a plain loop twice as fast. The next row
shows how much of a step the gradients take; reading and checking the recorded step costs the same for one network as
for 400.

*Exact ACC / Replay*: 1.17 to 1.52. On a network this small both are bound by elementwise work and call overhead, not by
matrix products. A hidden layer of exact ACC takes two products forward and five backward where a gradient takes one and
two; the first layer, whose inputs do not move, takes one and one, as the gradient does. On wide inputs, where the first
layer dominates, the two are closer (the rates above).

*Recording*: 1.04 to 1.15 on the MNIST network, 1.06 to 1.08 on the GPT, 1.06 to 1.35 on the tiny BERT: on this machine
one run meets the target and the next does not. On the small networks what a step costs is Python and small calls, each
four or five times as long as on its own, because the training's kernels have just used the cache: a copy of the
parameters and its norm, the states of random generators, the optimizer's settings. Batches are read for their hashes
several at a time for that reason. The faster the processor multiplies, the more the rest weighs: the MNIST network's
step takes 5 to 8 ms here, half a millisecond of which is added. On the GPT most is the writing of shards, 6 MB per
step, by a thread on cores that the training uses too. Its row has 60 steps; with 20, which pay for the first and the
last state and for recomputing three steps as a proof, it was 1.05 to 1.09.

*Replay of 32, MNIST CNN*: 0.46 to 0.55, and 0.64 to 0.91 before. Each model's gradient is traced and runs on its own
thread, with images laid out by channels throughout. Such a trace rounds differently from the recorded training; all
models of a replay, including the one with every example, round alike, so this cancels as other rounding does. The steps
before an example's first use, an eighth of these four epochs, are not taken.

*Replay of 64, GPT*: 0.26; 0.42 to 0.52 with MKL alone, and 0.53 to 0.60 before. One shard holds all models, and each
takes its gradient and steps in place, with cross-entropy and attention computed from elementary operations. What is
left is the number of steps: with one epoch a replay takes half of them, (N + 1)/2 of N, and each of the 65 models
computes the 100 queries' losses, about as much work as one step. So the count is 0.56 with 30 steps; one model on each
of two threads wastes less than one model on both, which brings it below. The gradient at an example's first use could
be had from one pass for all examples of its batch, as ḡ − g_k/|Z|. In float32 that would leave rounding where the exact
gradient is zero (the words that only this text has), which Adam's division makes large; so each replay takes its own.

*ACC / SGD-IE*: 1.30 to 1.69. ACC forms a gradient and a product per example where SGD-IE forms only their mean, and
moves each example's 13,750 numbers in and out of its row. The jump on the MNIST network takes 1.41 to 1.62: the
examples' gradients take a pass of their own there, about as long as a step of training, since kernels per example would
make the product slower by more.

*Plans*: the larger of planned and real time is at most 1.4 times the smaller, for runs of 152 and 313 steps. Before
images were planned from traces, ACC(free) on the MNIST network was planned to take eight times as long as it does.

## What each pass brings

A pass that only saves time stays if on one of four networks (the MNIST network, the GPT, the ResNet-18 and the tiny
BERT) something takes 1.2 times as long without it, or 1.5 times if it helps on one maker's processors only. What a step
computes was measured alone, with and without in turns, in processor time on one thread, the least of four to nine each,
on a machine with other work (two figures of one kind differ by up to a tenth). `--only ablation` measures the passes
that are there.

- *traces in two stages* (47 lines), at most 1.66: three products: MNIST network 1.66, GPT 1.57. **Stays.**
- *layout of images* (346 lines), at most 1.33: MNIST network: a product 1.12, three 1.07, with gradients 0.95, a
  replay's gradient 1.33; ResNet-18: a product 1.10. **Stays.**
- *oneDNN's products, on AMD's processors* (133 lines), at most 1.32: GPT: a product 1.30, three 1.32, with gradients
  1.25, a replay's gradient 1.27; MNIST network at most 1.03. **Stays until measured on two quiet threads, where 64
  replays had taken 1.6 to 2 times as long without.**
- *folded linear layers* (32 lines), at most 1.06: BERT: a product 1.06; but the gradients of a hundred 8-8 networks
  1.59, a hundred rows of exact ACC there 1.19. **Stays, for small networks.**
- *operations in place* (158 lines), at most 1.15: a product: MNIST network 1.14, GPT 1.14, ResNet-18 1.15, BERT 1.06;
  with gradients 1.05 and 1.10; three products 1.03 and 1.09; a replay's gradient 1.15 and 1.05. **Gone.**
- *sums and products in one operation (images)* (102 lines), at most 1.08: MNIST network: a product 1.02, with gradients
  1.08, three 0.99, a replay's gradient 1.02; ResNet-18: a product 1.02. **Gone.**
- *transposed products* (56 lines), at most 1.05: MNIST network: a product 1.03, with gradients 0.99; GPT: 0.98 and
  1.05; ResNet-18 and BERT: a product 1.01. **Gone.**
- *kept memory* (40 lines; freed blocks stayed with the process), at most 1.06: a product: MNIST network 0.98, ResNet-18
  1.06, GPT 0.94; with gradients 0.90; 16 rows of exact ACC on the MNIST network 1.04; ACC on the GPT 0.90. **Gone.**
- *blocks of coordinates* (125 lines), at most 1.06: ACC on the GPT over two steps 1.06. **Stays: it bounds the memory
  of jumps, and two threads share the blocks.**

Rows above that were measured with the passes that are gone cost up to that much more now: SGD-IE and ACC on the GPT and
on the MNIST network a tenth, SGD-IE on the ResNet-18 a tenth (3.00 instead of 2.72 times training), replays of the
MNIST network a seventh, the rest less.

## What the limits are

Counted in matrix products: a linear layer takes one forward and two backward in training, three in all. With x its
inputs, W its weights, v the vector and a dot for what changes along v, SGD-IE's product takes three forward (x·W, x·v,
ẋ·W) and five backward, eight in all, and no gradient is formed. The rest is elementwise: normalisation, attention and
the loss twice over, the optimizer's derivative, and reading and checking the recorded steps.

| what | products | limit |
| --- | --- | --- |
| SGD-IE / training | 8 of 3 | 2.67 |
| TracIn / training | 3 of 3 | 1 |
| SGD-IE / training, adapters: frozen weights have no gradient and no vector | 4 of 2 | 2 |
| SGD-IE for many vectors / as many times one: each has its own six, the other two are shared | 6 of 8 | 0.75 |

The count assumes that training and scoring multiply matrices equally fast. On AMD's processors they do not: PyTorch
multiplies with MKL, which does without AVX-512 there, so large products go to oneDNN while scoring and replaying (the
row that compares the two), and training, which is the user's own, takes MKL's. Hence rows of transformers below their
limits. Before, with MKL alone and on an earlier machine, SGD-IE took 2.43 times training on the GPT, TracIn 1.21, and
64 replays 0.42 of 64 trainings.

A third for 64 vectors cannot be reached on a network that is bound by its matrix products; small networks, bound by
call overhead, reach it (the row with 100 outputs above). Every step's gradient is compared with the recorded one along
a query vector, which costs nothing; the first, the last and every sixteenth step are recomputed in full, which costs a
gradient each and weighs more the shorter a run is.

The targets of the products alone are this count, or near it, not goals that were set beforehand. A whole sweep takes
more than its products: a step also reads its state and takes the optimizer's derivative, some twenty elementwise passes
over the parameters; the rest is paid once per sweep: three steps recomputed, the queries' gradient.

*ResNet-18*: 2.72 was measured with operations in place, 3.00 without, as it is now (above). BatchNorm takes some 20
elementwise passes over the images, where a step of training has one fused kernel each way. The jump under BatchNorm
takes the gradient of the batch without each example, one by one on each thread: 21 times training, 34 before. One such
gradient takes as long as a step of training.

*From cold*: 2.12 to 2.43, and 2.37 to 2.70 before; a sweep with everything traced takes 1.9. Of 2.7 s, the trace takes
0.3, the comparison of derivatives at the last state 0.13, the gradient of the 1,000 queries 0.13, the ten steps
recomputed in full 0.1.

*Kinks*: 1.15 to 1.24 on the MNIST network and 1.13 to 1.20 on the digits. The rest are elementwise passes over the
activations, which two threads speed up less than they do the convolutions.

*64 query vectors*: 0.49 to 0.52 with 16 steps, where 64 vectors at once took more than 64 times one. Vectors go through
the product one at a time on each thread; the forward pass and the gradients of all activations, which do not depend on
the vector, are computed once per step. The product then takes 0.64 to 0.70 of what it takes for a single vector (the
row with eight vectors), below the count, because one vector on each of two threads wastes less than one on both. The
row is lower still because a sweep for one vector pays alone for what is paid once. A third is below what the processor
can do: the six products of a vector are 26 GFLOP, 0.06 s at the rate of oneDNN's matrix product (its row), and a third
of a single product, with everything else in it, is 0.054 s.

*Traces*: made if a run has more than 64 steps, which is about where they pay off, from the smallest network to the GPT.
A run of fewer steps does without, unless it is scored repeatedly.

*Adapters*: nearly all the time that SGD-IE takes the first time on adapters of a large frozen model is the comparison
of derivatives, in float64, when the task is made and at the last state: with 101 million weights, 60 calls of the model
and 41 s of 52 s of processor time (one thread; a second scoring takes 10.5 s). From 16 million weights on two examples
are taken instead of three, and kinds that differ only in the axis of `vmap` are compared once.

The jump's limit is not a product. The examples' gradients come with SGD-IE's product for one more matrix product per
layer, as counted (a ninth). The optimizer's step is then taken once per example of the batch: 18 passes over 42 million
numbers on the GPT, and three inner products; the rows of the embedding that an example does not touch, a fifth of the
numbers, are skipped. The faster the products, the more this weighs: with two threads the row is 1.43 to 1.55 with MKL's
products and with oneDNN's 1.49 to 1.51, and 1.56 over 32 steps, where less of the time is what a sweep pays once.
Square roots are taken as powers, which PyTorch computes faster on AMD's processors. A single kernel by `torch.compile`
was tried: it is faster, but compiling it takes longer than a sweep of a few dozen steps can save, so it is not used.
"""

LOAD = """
## Load

Measured by `python -m experiments load`; [what the columns mean](load.md).

"""


@dataclass(frozen=True)
class Row:
    """One measured figure, which should be at most (``<=``) or at least (``>=``) its target."""

    what: str
    value: float
    bound: str
    target: float
    detail: str = ""

    @property
    def meets(self) -> bool:
        """Say whether the figure is on the right side of its target."""
        return self.value <= self.target if self.bound == "<=" else self.value >= self.target


def run_cases(cases: Sequence[Callable[[], list[Row]]]) -> Iterator[Row]:
    """Yield the rows of all cases, as they are measured."""
    for case in cases:
        yield from case()


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write ``benchmarks.json`` and ``benchmarks.md``; rows that were not measured again are kept."""
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "python": platform.python_version()}
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(({row.what: row for row in _written(folder)} | {row.what: row for row in rows}).values())
    content = {"machine": machine, "rows": [{**asdict(row), "meets": row.meets} for row in rows]}
    write_text(folder / "benchmarks.json", json.dumps(content, indent=1) + "\n")
    lines = [HEAD + f"{machine['threads']} threads, PyTorch {machine['torch']}, Python {machine['python']}.", ""]
    lines += ["| what | measured | target | meets | how |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {row.what} | {row.value:.4g} | {row.bound} {row.target:.4g} | {'yes' if row.meets else '**no**'} | "
        f"{row.detail} |"
        for row in rows
    ]
    loads = folder / "load.json"
    load = LOAD + "\n".join(load_table(json.loads(loads.read_text())["rows"])) + "\n" if loads.exists() else ""
    write_text(folder / "benchmarks.md", "\n".join(lines) + "\n" + NOTES + load)


def load_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what ``python -m experiments load`` measured, as the lines of a table."""
    lines = ["| what | time | CPU time | per step | peak memory | growth per step | on disk |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        disk = f"{row['disk'] / 1e6:,.0f} MB" if "disk" in row else "-"
        lines.append(
            f"| {row['what']} | {row['seconds']:,.0f} s | {row['processor']:,.0f} s | "
            f"{row['processor'] / row['steps'] * 1e3:.2f} ms | "
            f"{row['peak'] / 1e6:,.0f} MB | {row['growth']:.1f} bytes | {disk} |"
        )
    return lines


def _written(folder: Path) -> list[Row]:
    file = folder / "benchmarks.json"
    if not file.exists():
        return []
    rows = json.loads(file.read_text())["rows"]
    return [Row(*(row[name] for name in ("what", "value", "bound", "target", "detail"))) for row in rows]
