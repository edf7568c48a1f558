"""What scoring costs on the kinds of models people use: one function per claim, both sides measured in one run."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.data import Dataset

from experiments.bench.networks import Problem, slim_resnet, small_gpt
from experiments.bench.problems import QUIET, binary, images, plain_training, quickest, seconds
from experiments.bench.table import Row
from leaveout.diff.hessian import Hessian, pull_by_example
from leaveout.diff.operator import reads
from leaveout.estimators import ACC, SGDIE, Estimator, TracIn
from leaveout.task.execution import Chunks
from leaveout.task.rewrites.products import FastProducts, is_faster
from leaveout.task.trace.tracer import PAYS, WARM_UP
from leaveout.trajectory.trajectory import Trajectory

GPT = "GPT of four layers of width 128, 1.3 million parameters, 2,000 words, batches of 32 x 64, AdamW"
LONG = 1000
"""How many steps a run is taken to have whose derivatives are traced before they are measured."""

QUICKER = "the quicker of two each, traced before"


def gpt_sweeps() -> list[Row]:
    """Compare SGD-IE and TracIn with training on the GPT."""
    steps = 32
    training, sgdie, tracin = _timed(small_gpt(steps, queries=8), SGDIE(), TracIn())
    how = f"{GPT}, {steps} steps: training {training:.1f} s, SGD-IE {sgdie:.1f} s, TracIn {tracin:.1f} s, {QUICKER}"
    return [
        Row("SGD-IE / training, GPT", sgdie / training, "<=", 2.9, how),
        Row("TracIn / training, GPT", tracin / training, "<=", 1.5, "the same run"),
    ]


def gpt_products() -> list[Row]:
    """Compare the product that a step of SGD-IE or TracIn computes, and nothing around it, with a training step."""
    problem = small_gpt(2, queries=8)
    trajectory = Trajectory(problem.run, problem.task).compared()
    objective, recorded = trajectory.objective, trajectory.recorded_step(1)
    objective.execution.tracer.expect(LONG)
    vector = {name: torch.randn_like(tensor) for name, tensor in recorded.params.items()}
    stack = {name: tensor[None] for name, tensor in vector.items()}
    many = {name: torch.randn(8, *tensor.shape) for name, tensor in vector.items()}
    calls = (
        lambda: Hessian(objective, recorded.params, recorded.batch).pull(stack),
        lambda: reads(objective, recorded.params, recorded.batch, stack),
        lambda: pull_by_example(objective, recorded.params, recorded.batch, vector),
    )

    def eight() -> object:
        apart = objective.chunked(Chunks(threads=torch.get_num_threads()))
        return Hessian(apart, recorded.params, recorded.batch).pull(many)

    quickest(8, *calls)  # traced from then on
    eight()
    training, product, slopes, joint, each = quickest(4, problem.train, *calls, eight)
    how = f"{GPT}: a step of training {training / 2 * 1e3:.0f} ms, the product {product * 1e3:.0f} ms, the losses "
    how += f"along a vector {slopes * 1e3:.0f} ms, the product with gradients {joint * 1e3:.0f} ms, eight products "
    how += f"{each * 1e3:.0f} ms, the quickest of four each, traced before"
    return [
        Row("SGD-IE's product / a step of training, GPT", 2 * product / training, "<=", 2.67, how),
        Row("TracIn's product / a step of training, GPT", 2 * slopes / training, "<=", 1.2, "the same run"),
        Row("SGD-IE's product with examples' gradients / alone, GPT", joint / product, "<=", 1.2, "the same run"),
        Row("SGD-IE's product, 8 vectors / 8 times one, GPT", each / (8 * product), "<=", 0.75, "the same run"),
    ]


def matrix_products() -> list[Row]:
    """Compare oneDNN's matrix product with MKL's, for a layer of the GPT, where oneDNN's is used."""
    if not is_faster():
        return []
    left, right, times = torch.randn(2048, 128), torch.randn(128, 512), 100

    def products() -> None:
        for _ in range(times):
            left @ right

    def faster() -> None:
        with FastProducts():
            products()

    mkl, onednn = quickest(10, products, faster)
    work = 2 * times * left.numel() * right.shape[1] / 1e9
    how = (
        f"2,048 x 128 by 128 x 512: {work / onednn:.0f} and {work / mkl:.0f} GFLOP/s, {times} each, the quickest of ten"
    )
    return [Row("a matrix product by oneDNN / by MKL", onednn / mkl, "<=", 0.7, how)]


def traces() -> list[Row]:
    """Measure after how many calls the trace of SGD-IE's product has saved the time that it took to make."""
    rows, gpt = [], small_gpt(2, queries=8)
    for what, task, run in (("Adult 8-8", *binary("adult", "mlp", epochs=1)[1:]), ("GPT", gpt.task, gpt.run)):
        trajectory = Trajectory(run, task).compared()
        recorded = trajectory.recorded_step(0)
        vector = {name: torch.randn_like(tensor)[None] for name, tensor in recorded.params.items()}
        trajectory.objective.execution.tracer.expect(LONG)
        eager, traced = (
            partial(Hessian(way, recorded.params, recorded.batch).pull, vector)
            for way in (trajectory.objective.untraced(), trajectory.objective)
        )
        *_, made = (seconds(traced)[0] for _ in range(WARM_UP + 1))  # the last of these calls makes the trace
        slow, fast = quickest(8, eager, traced)
        how = f"the trace takes {made:.2f} s, a call {slow * 1e3:.2f} ms without and {fast * 1e3:.2f} ms with it"
        calls = (made - fast) / (slow - fast)
        rows.append(
            Row(f"calls after which the trace of SGD-IE's product pays off, {what}", calls, "<=", 2 * PAYS, how)
        )
    return rows


def gpt_jump() -> list[Row]:
    """Compare the jump with SGD-IE on the GPT, in short runs and in longer ones."""
    rows = []
    for steps, what in ((8, ""), (32, ", 32 steps")):
        _, sgdie, jump = _timed(small_gpt(steps, queries=8), SGDIE(), ACC(), rounds=6 if steps == 8 else 3)
        how = f"the same, {steps} steps: SGD-IE {sgdie:.1f} s, ACC(jump) {jump:.1f} s, the quickest of "
        how += f"{'six' if steps == 8 else 'three'} each, traced before"
        rows.append(Row(f"ACC(jump) / SGD-IE, GPT{what}", jump / sgdie, "<=", 1.5, how))
    return rows


def resnet_sweep() -> list[Row]:
    """Compare SGD-IE with training on a ResNet-18 with BatchNorm."""
    steps = 32
    training, sgdie = _timed(slim_resnet(steps), SGDIE())
    how = f"CIFAR-10, batches of 64, momentum, a quarter of the original's width, {steps} steps: training "
    how += f"{training:.1f} s, SGD-IE {sgdie:.1f} s, {QUICKER}"
    return [Row("SGD-IE / training, ResNet-18 with BatchNorm", sgdie / training, "<=", 3.2, how)]


def resnet_jump() -> list[Row]:
    """Compare the jump with training under BatchNorm: it takes each batch's gradient without each of its examples."""
    steps, size = 8, 16
    problem = slim_resnet(steps, size=size)
    score = _scored(problem, ACC(), "mean")
    training, jump = quickest(2, problem.train, score)
    how = f"CIFAR-10, batches of {size}, momentum, a quarter of the original's width, {steps} steps: training "
    how += f"{training:.2f} s, ACC(jump) {jump:.1f} s, the quicker of two each; SGD-IE's product and a gradient per "
    how += "example are counted as the target"
    return [Row("ACC(jump) / training, ResNet-18 with BatchNorm", jump / training, "<=", size + 8 / 3, how)]


def adapter_sweep() -> list[Row]:
    """Compare SGD-IE with training if only LoRA adapters are trained."""
    steps = 8
    problem = small_gpt(steps, width=512, adapters=True)
    training, sgdie = _timed(problem, SGDIE())
    how = f"LoRA of rank 8 on the GPT at width 512, {steps} steps: training {training:.1f} s, SGD-IE {sgdie:.1f} s, "
    how += QUICKER
    return [Row("SGD-IE / training, LoRA adapters", sgdie / training, "<=", 3.0, how)]


def image_tracin() -> list[Row]:
    """Compare TracIn with training on the MNIST network."""
    dataset, task, run = images(5_120, 4)
    training, tracin = quickest(
        5,
        lambda: plain_training(task, run, copy.deepcopy(task.model), nn.CrossEntropyLoss()),
        lambda: TracIn().score(run, task, dataset.val, resources=QUIET),
    )
    how = f"{len(run)} steps of 64: training {training:.1f} s, TracIn {tracin:.1f} s, the quickest of five each"
    return [Row("TracIn / training, MNIST CNN", tracin / training, "<=", 1.5, how)]


def short_run() -> list[Row]:
    """Compare SGD-IE with training on a short run of the MNIST network, from a cold start: tracing is included."""
    dataset, task, run = images(9_024, 1)
    training, cold = quickest(
        8,
        lambda: plain_training(task, run, copy.deepcopy(task.model), nn.CrossEntropyLoss()),
        lambda: SGDIE().score(run, task.anew(), dataset.val, resources=QUIET),
    )
    how = f"{len(run)} steps of 64: training {training:.2f} s, SGD-IE {cold:.2f} s, the quickest of eight each"
    return [Row("SGD-IE from cold / training, MNIST CNN, 141 steps", cold / training, "<=", 2.3, how)]


def query_vectors() -> list[Row]:
    """Compare SGD-IE for 64 queries, one vector each, with 64 times one."""
    steps = 16  # with few, the fixed costs of a sweep would count 64 times too much on one side
    problem = small_gpt(steps, queries=64)
    problem.task.objective.execution.tracer.expect(LONG)
    one, each = (_scored(problem, SGDIE(), queries) for queries in ("mean", "each"))
    one()
    (alone,) = quickest(2, one)
    together = seconds(each)[0]
    how = f"{GPT}, {steps} steps: one vector {alone:.1f} s, 64 vectors {together:.1f} s, tracing included"
    return [Row("SGD-IE, 64 query vectors / 64 times one, GPT", together / (64 * alone), "<=", 1 / 3, how)]


def scoring_memory() -> list[Row]:
    """Compare the peak memory of a process that scores the GPT's run with that of one that trains it."""
    training, scoring = (_peak(what) for what in ("train", "score"))
    how = f"{GPT}, 8 steps: {training / 1e6:,.0f} MB and {scoring / 1e6:,.0f} MB, PyTorch itself included"
    return [Row("peak memory, SGD-IE / training, GPT", scoring / training, "<=", 2.5, how)]


def _peak(what: str) -> int:
    """Measure peak memory in a separate process."""
    command = [sys.executable, "-c", f"from experiments.bench import sweeps; sweeps.alone({what!r})"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - the command above
    return int(done.stdout.split()[-1])


def alone(what: str) -> None:
    """Train the GPT or score its run, and print the largest resident size reached."""
    from leaveout.compute.cost import Cost

    problem, cost = small_gpt(8), Cost()
    work: Callable[[], object] = problem.train if what == "train" else _scored(problem, SGDIE(), "mean")
    with cost.metered(problem.task.device):
        work()
    sys.stdout.write(f"{cost.peak_memory}\n")


def _timed(problem: Problem, *estimators: Estimator, rounds: int = 2) -> list[float]:
    """Measure the least seconds of training and of each estimator, in turns, with everything traced beforehand."""
    problem.task.objective.execution.tracer.expect(LONG)
    scored = [_scored(problem, estimator, "mean") for estimator in estimators]
    for score in scored:
        score()
    return quickest(rounds, problem.train, *scored)


def _scored(problem: Problem, estimator: Estimator, queries: str) -> Callable[[], object]:
    query: Dataset = problem.query
    return lambda: estimator.score(problem.run, problem.task, query, queries=queries, resources=QUIET)


CASES = (
    gpt_sweeps,
    gpt_products,
    matrix_products,
    traces,
    gpt_jump,
    resnet_sweep,
    resnet_jump,
    adapter_sweep,
    image_tracin,
    short_run,
    query_vectors,
    scoring_memory,
)
