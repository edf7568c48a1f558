"""One function per claim: each measures both sides in the same run."""

from __future__ import annotations

import copy
from functools import partial
from statistics import mean

import torch
from torch import nn
from torch.utils.data import TensorDataset

from experiments.bench import costs, jumps, sweeps
from experiments.bench.ablation import ablation
from experiments.bench.problems import QUIET, binary, digits, images, plain_training, quickest, seconds
from experiments.bench.table import Row
from experiments.bench.trainers import adapters, trainer_recording
from leaveout.diff.hessian import Hessian
from leaveout.diff.operator import stacked_gradients
from leaveout.estimators import ACC, SGDIE, Replay, TracIn
from leaveout.evaluate.metrics import kendall
from leaveout.run.reader import Run
from leaveout.sweep.transports import Subspace
from leaveout.task.task import Task
from leaveout.trajectory.trajectory import Trajectory

FIVE = [
    ("adult", "logistic"),
    ("20news", "logistic"),
    ("mnist-1v7", "logistic"),
    ("mnist-1v7", "mlp"),
    ("20news", "mlp"),
]


def image_sweeps() -> list[Row]:
    """Compare SGD-IE with plain training, and ACC with SGD-IE, on the MNIST network."""
    dataset, task, run = images(5_120, 4)  # several epochs, as in most training runs
    training, sgdie, acc = quickest(
        8,
        lambda: plain_training(task, run, copy.deepcopy(task.model), nn.CrossEntropyLoss()),
        lambda: SGDIE().score(run, task, dataset.val, resources=QUIET),
        lambda: ACC().score(run, task, dataset.val, resources=QUIET),
    )
    times = f"training {training:.1f} s, SGD-IE {sgdie:.1f} s, ACC(free) {acc:.1f} s"
    how = f"MNIST CNN, {len(run)} steps of 64, 4 epochs: {times}, the quickest of eight each"
    return [
        Row("SGD-IE / plain training of the same steps", sgdie / training, "<=", 2.5, how),
        Row("ACC(free) / SGD-IE, one query", acc / sgdie, "<=", 1.5, "the same run"),
    ]


def kinked_sweeps() -> list[Row]:
    """Compare SGD-IE with the curvature of kinks and without, on the MNIST network and on a 64-64 network of digits."""
    rows = []
    for name, (dataset, task, run) in (("MNIST CNN", images(2_560, 3)), ("digits 64-64", digits((64, 64), 20))):
        methods = (SGDIE(), SGDIE(kinks=True))
        plain, bent = quickest(6, *(partial(one.score, run, task, dataset.val, resources=QUIET) for one in methods))
        how = f"{len(run)} steps: {plain:.2f} s and {bent:.2f} s, the quickest of six each"
        rows.append(Row(f"SGD-IE with kinks / without, {name}", bent / plain, "<=", 1.15, how))
    return rows


def example_count() -> list[Row]:
    """Compare the cost of a step for few and for many examples: it must not depend on their number."""
    each, peak = {}, 0
    for n, epochs in ((1000, 40), (50_000, 1)):
        dataset, task, run = images(n, epochs)
        ACC().score(run.head(40), task, dataset.val, resources=QUIET)  # tracing, and touching memory for the first time
        cost = ACC().score(run, task, dataset.val, resources=QUIET).cost
        each[n], peak = cost.seconds / len(run), cost.peak_memory
    how = f"{each[1000] * 1e3:.1f} and {each[50_000] * 1e3:.1f} ms per step; {peak / 1e9:.1f} GB at n = 50,000"
    return [Row("ACC(free), a step at n = 50,000 / at n = 1,000", each[50_000] / each[1000], "<=", 1.2, how)]


def long_run() -> list[Row]:
    """Compare a step of TracIn in a run of 4,000 steps with one of 400; with momentum, states are kept as gradients."""

    def per_step(epochs: int) -> float:
        dataset, task, run = binary("adult", "mlp", epochs=epochs, momentum=0.5)
        (least,) = quickest(3, lambda: TracIn().score(run, task, dataset.val, resources=QUIET))
        return least / len(run)

    short, long = per_step(100), per_step(1000)
    how = f"Adult 8-8, momentum: {long * 1e3:.2f} and {short * 1e3:.2f} ms per step, the quickest of three each"
    return [Row("TracIn, a step in a run of 4,000 steps / of 400", long / short, "<=", 1.2, how)]


def many_outputs() -> list[Row]:
    """Compare a hundred query outputs with a hundred times one."""
    dataset, task, run = binary("adult", "mlp", epochs=38)
    some = TensorDataset(dataset.val.x[:100], dataset.val.y[:100])
    ACC().score(run.head(20), task, dataset.val, resources=QUIET)
    one, _ = seconds(lambda: ACC().score(run, task, dataset.val, resources=QUIET))
    hundred, _ = seconds(lambda: ACC(readout="outputs").score(run, task, some, resources=QUIET))
    how = f"Adult 8-8: {one:.2f} s and {hundred:.2f} s"
    return [Row("ACC(free), 100 query outputs / 100 times one", hundred / (100 * one), "<=", 0.25, how)]


def replays() -> list[Row]:
    """Compare exact replay with a plain loop, and exact ACC with exact replay."""
    dataset, task, run = binary("adult", "mlp", epochs=38)
    loss = nn.BCEWithLogitsLoss()
    plain, replay, acc = quickest(
        10,
        lambda: plain_training(task, run, copy.deepcopy(task.model), loss),
        lambda: Replay().score(run, task, dataset.val, resources=QUIET),
        lambda: ACC("exact").score(run, task, dataset.val, resources=QUIET),
    )
    how = f"Adult 8-8, n = 400, {len(run)} steps: {replay:.2f} s, a plain model {plain:.3f} s, the quickest of ten each"
    return [
        Row("Replay of 400 / 400 plain loops", replay / (400 * plain), "<=", 1 / 50, how),
        Row("exact ACC / Replay", acc / replay, "<=", 1.5, f"the same, {acc:.2f} s; {_parts(task, run, replay, acc)}"),
    ]


def _parts(task: Task, run: Run, replay: float, acc: float) -> str:
    """Time the derivatives alone: the gradients of 400 models, and the change of the gradient along 400 rows."""
    recorded = Trajectory(run, task).recorded_step(len(run) // 2)
    stack = {n: t + 0.01 * torch.randn(400, *t.shape) for n, t in recorded.params.items()}
    weights = torch.ones(400, 100)
    calls = (
        lambda: stacked_gradients(task.objective, stack, weights, recorded.batch),
        lambda: Hessian(task.objective, recorded.params, recorded.batch).push(stack, weights, weights),
    )
    quickest(8, *calls)  # traced from then on
    gradients, changes = (1e3 * t for t in quickest(50, *calls))
    steps = len(run) / 1e3
    return (
        f"of a step, Replay's gradients take {gradients:.1f} of {replay / steps:.1f} ms, ACC's products "
        f"{changes:.1f} of {acc / steps:.1f} ms"
    )


def wide_inputs() -> list[Row]:
    """Measure how much of the machine's matrix rate the first layer's products reach."""
    dataset, task, run = binary("20news", "mlp", epochs=10)
    width = dataset.train.x.shape[1]
    left, right = torch.randn(400 * 8, width), torch.randn(width, 100)
    left @ right
    plain, _ = seconds(lambda: [left @ right for _ in range(10)])
    work = 2 * 400 * 8 * width * 100
    rate = 10 * work / plain
    rows = []
    for estimator in (Replay(), ACC("exact")):
        elapsed = estimator.score(run, task, dataset.val, resources=QUIET).cost.seconds
        reached = 2 * work * len(run) / elapsed  # one product forward and one back
        how = f"20News 8-8: {reached / 1e9:.0f} of {rate / 1e9:.0f} GFLOP/s"
        rows.append(Row(f"{estimator.name}, layer-1 rate / plain matmul", reached / rate, ">=", 0.25, how))
    return rows


def cheap_transports() -> list[Row]:
    """Correlate the ranks of the cheap transports with those of the exact one, on five tasks."""
    rows = []
    for name, model in FIVE:
        dataset, task, run = binary(name, model, n=200, size=50, epochs=30)
        exact = ACC("exact").score(run, task, dataset.val, resources=QUIET).mean()
        for transport, target in (("free", 0.98), (Subspace(8), 0.99)):
            estimator = ACC(transport)
            values = estimator.score(run, task, dataset.val, resources=QUIET).mean()
            tau = kendall(values, exact)
            what = f"tau({estimator.name}, exact ACC), {name}, {model}"
            rows.append(Row(what, tau, ">=", target, "n = 200, batch 50, 30 epochs, lr 0.1"))
    return rows


def faithful_outputs() -> list[Row]:
    """Correlate the ranks of ACC with the outputs readout with those of exact leave-one-out."""
    rows = []
    for name in ("adult", "20news", "mnist-1v7"):
        taus = []
        for seed in range(5):
            dataset, task, run = binary(name, "logistic", seed=seed, l2=0.01)
            truth = Replay().score(run, task, dataset.val, resources=QUIET).mean()
            values = ACC(readout="outputs").score(run, task, dataset.val, resources=QUIET).mean()
            taus.append(kendall(values, truth))
        how = f"n = 400, batch 100, 30 epochs, lr 0.1, l2 0.01; five seeds, {min(taus):.3f} to {max(taus):.3f}"
        rows.append(Row(f"tau(ACC(free) outputs, exact leave-one-out), {name}, logistic", mean(taus), ">=", 0.96, how))
    return rows


CASES = {
    case.__name__: case
    for case in (
        image_sweeps,
        kinked_sweeps,
        example_count,
        long_run,
        many_outputs,
        replays,
        wide_inputs,
        trainer_recording,
        adapters,
        cheap_transports,
        faithful_outputs,
        *costs.CASES,
        *sweeps.CASES,
        *jumps.CASES,
        ablation,
    )
}
