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

Measured by `leaveout bench` (or `make bench`) with the real data sets (`LEAVEOUT_DATA`). ACC is accumulative
SGD-influence estimation, SGD-IE is SGD-influence estimation ([methods](methods.md)). Every figure is a ratio of two
things measured in the same run, or a rank correlation; "meets" compares it with its target. A case can be measured
alone (`--only`) and then replaces its own rows, so not all rows are from the same day. For very long and very wide runs
see [load](load.md); for a whole data set, [all of MNIST](mnist.md).

"""

NOTES = """
## Close to their targets

Some ratios are so close to their targets that on two shared cores one run meets them and the next does not.

*Replay / plain loops*: 0.0170 to 0.0228. The next row shows how much of a step the gradients take; reading and checking
the recorded step costs the same for one network as for 400.

*Exact ACC / Replay*: 1.31 to 1.52. On a network this small both are bound by elementwise work and call overhead, not by
matrix products. A hidden layer of exact ACC takes two products forward and five backward where a gradient takes one and
two; the first layer, whose inputs do not move, takes one and one, as the gradient does. On wide inputs, where the first
layer dominates, the two are closer (the rates above).

*Recording*: 1.02 to 1.17 on the MNIST network, 1.06 to 1.21 on the tiny BERT. What a step costs is Python and small
calls, each several times as long as by itself, since the training's kernels have just had the cache. Batches' rows are
added up in the training, and the rest of their hashing is done for all batches of a shard at once by the thread that
writes. The copy of the parameters by whose norm a NaN, or a change between steps, is found is also the state that is
kept, and is made in parts that PyTorch copies on one thread. What is left on the BERT is reading each parameter's count
of steps, that copy and its norm; of the writing, a checksum and two copies. A short run waits for the disk four times
at its end.

*Replay of 32, MNIST CNN*: 0.46, and 0.64 to 0.91 before. Each model's gradient goes by a trace on a thread of its own,
with images laid out by channels throughout: some 8 ms of processor time (one thread), where it took 13 in the layout of
the training and an ordinary step takes 13 to 14. Such a trace rounds in another way than the recorded training did; all
models of a replay, the one with every example among them, round alike, so that this cancels as other rounding does. The
steps before an example's first use, an eighth of these four epochs, are not taken.

*Replay of 64, GPT*: 0.49, and 0.53 to 0.60 before, when one model's linear layers were computed as those of a stack of
models are. One shard holds all models, and each takes its gradient and steps in place, with cross-entropy and attention
from elementary operations: they round in another way than the recorded training, all models of a replay alike. What is
left is the number of steps: with one epoch a replay takes half of them, (N + 1)/2 of N, and each of the 65 models
computes the 100 queries' losses, about as much as one step. So the count is 0.56 with 30 steps; that one model
on each of two threads wastes less than one on both brings it below. The gradient at an example's first use could be had
from one pass for all examples of its batch, as ḡ − g_k/|Z|. In float32 that would leave rounding where the exact
gradient is zero (the words that only this text has), which Adam's division makes large; so each replay takes its own.

*ACC / SGD-IE*: 1.30 to 1.54. ACC forms a gradient and a product per example where SGD-IE forms only their mean, and
moves each example's 13,750 numbers in and out of its row.

## What the limits are

Counted in matrix products: a linear layer takes one forward and two back in training, three in all. With x its inputs,
W its weights, v the vector and a dot for what changes along v, SGD-IE's product takes three forward (x·W, x·v, ẋ·W) and
five back, eight in all, and no gradient is formed. What comes on top is elementwise: normalisation, attention and the
loss twice over, the optimizer's derivative, and reading and checking the recorded steps.

| what | products | limit |
| --- | --- | --- |
| SGD-IE / training | 8 of 3 | 2.67 |
| TracIn / training | 3 of 3 | 1 |
| SGD-IE / training, adapters: frozen weights have no gradient and no vector | 4 of 2 | 2 |
| SGD-IE for many vectors / as many times one: each has its own six, only the gradient is shared | 6 of 8 | 0.75 |

So a third for 64 vectors cannot be reached on a network that is bound by its matrix products; small ones, bound by the
calls, reach it (the row with 100 outputs above). Every step's gradient is compared with the recorded one along the
query's vector, which costs nothing; the first, the last and every sixteenth step are computed again as a whole, which
costs a gradient each and weighs more the shorter a run is.

The targets of the products alone are this count, or near it, not goals that were set beforehand. Whole sweeps of 32
steps on that GPT take 2.74 to 2.94 and 1.33 to 1.54 times training. Beside the product, a step reads its state and
takes the optimizer's derivative, some twenty elementwise passes over the parameters; the rest is paid once per sweep:
three steps computed again, the queries' gradient, memory that is handed back and asked for again.

*ResNet-18*: with 16 steps 3.83 before, and 3.45 now that elementwise derivatives do not mix images by pixels with
images by channels, which took three times as long as one layout does; the row has 32 steps, as the GPT's has, of which
three are computed again. The product alone is at the count above; BatchNorm takes some 20 elementwise passes over the
images, where a step of training has one fused kernel each way.

*From cold*: 2.37, and 2.44 to 2.61 before; a sweep with everything traced takes 1.85 to 2.0: the comparison of
derivatives at the last state and the trace of the product are paid once. The gradient of the steps that are computed
again is not traced, since ten calls do not pay for it, and a trace's first results serve all its comparisons.

*Kinks*: 1.16 and 1.18 by the clock with two threads; before, 1.25 and 1.17. What comes on top are elementwise passes
over the activations, which two threads quicken less than they do the convolutions.

*64 query vectors*: 58.7 s for two steps, 0.46 s per vector and step, where the product for one vector takes 0.39 s: a
stack of products is no quicker than one after the other, as the count says. With two steps the row's ratio was 0.40,
since the run with one vector pays all that is paid once; it is not in the table for that reason. The case now takes
four steps.

The case on many vectors (`query_vectors`) has no row above, as it has not been measured on a quiet machine.

*Adapters*: nearly all that SGD-IE takes the first time on adapters of a large frozen model is the comparison of
derivatives, in float64, when the task is made and at the last state. On a model of 101 million weights that was 94
calls of the model, of three examples, and 79 s of processor time of 90 (one thread; a second scoring takes 10.5 s). Now
the losses of the gradients serve the check that examples do not depend on each other, inner products are compared in
the one way that is used, and with 16 million weights or more two examples are taken, not three; what differs only in
the axis that `vmap` goes along is not compared twice. That is 60 calls of the model, and 41 s of 52: the references
take a quarter, and each composition of forward and reverse mode is still compared once at each of the two states.
Products that recur often enough to be traced have no part for frozen weights; in the first six of a sweep, PyTorch
multiplies by tangents of zero, two products of six.

The jump's limit is not a product. The examples' gradients come with SGD-IE's product for one matrix product per layer
more, as counted (a ninth). The optimizer's step is then taken once per example of the batch: 18 passes over 42 million
numbers on the GPT, and three inner products. A fifth of the numbers, the rows of the embedding that an example does not
touch, are passed over. Gradients of weight matrices came transposed, and each block copied nine arrays to match them;
now the trace multiplies the other way round, to the same bits. With this the row is 1.43 to 1.55 by the clock with two
threads, where it was 1.59 to 1.75: elementwise work on this machine is at times half as quick for minutes. A single
kernel by `torch.compile` was tried: it is quicker, but compiling it takes longer than a sweep of a few dozen steps can
save, so it is not used.
"""

LOAD = """
## Load

Measured by `leaveout load`; [what the columns mean](load.md).

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
    """Return what ``leaveout load`` measured, as the lines of a table."""
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
