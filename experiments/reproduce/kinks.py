"""The effect of the curvature of kinks on SGD-IE: ReLU networks, with and without it, against exact replays."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.utils.data import TensorDataset

from experiments.reproduce.markdown import spread, table
from experiments.reproduce.networks import Trained, network, trained
from experiments.reproduce.plots import Panel, Plot, Series
from experiments.reproduce.problems import QUIET, binary
from experiments.reproduce.spec import Row, Settings, Spec
from leaveout.builtin import data
from leaveout.errors import LeaveoutWarning
from leaveout.estimators import ACC, SGDIE, Estimator, Replay, score
from leaveout.evaluate.metrics import kendall, rmse
from leaveout.sweep.kink_size import LARGEST, kink_size
from leaveout.trajectory.trajectory import Trajectory

BASE: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "batch": 50, "epochs": 20, "dtype": "float64", "replays": None}
DIGITS: dict[str, Any] = {**BASE, "data": "digits", "n": 200, "queries": 200, "activation": "relu"}
PAIR: dict[str, Any] = {**BASE, "model": "mlp", "noise": "clean", "level": 0.0, "l2": 0.0}
PAPER = {"n": 400, "batch": 100, "epochs": 30}
NETWORKS: dict[str, dict[str, Any]] = {
    "digits 64-12-10": {**DIGITS, "hidden": [12]},
    "digits 64-8-8-10": {**DIGITS, "hidden": [8, 8]},
    "digits 64-64-10": {**DIGITS, "hidden": [64]},
    "digits 64-32-32-10": {**DIGITS, "hidden": [32, 32], "n": 400},
    "digits 64-64-64-10": {**DIGITS, "hidden": [64, 64], "n": 400},
    "Adult 8-8, n = 200": {**PAIR, "data": "adult", "n": 200},
    "Adult 8-8": {**PAIR, **PAPER, "data": "adult"},
    "20News 8-8": {**PAIR, **PAPER, "data": "20news"},
    "MNIST 1v7 8-8, n = 200": {**PAIR, "data": "mnist-1v7", "n": 200},
    "MNIST 1v7 8-8": {**PAIR, **PAPER, "data": "mnist-1v7"},
    "MNIST conv-conv-fc": {**BASE, "data": "mnist", "n": 512, "queries": 200, "batch": 64, "epochs": 6, "replays": 100},
}
METHODS: dict[str, Estimator] = {
    "SGD-IE": SGDIE(),
    "SGD-IE(kinks)": SGDIE(kinks=True),
    "ACC(free)": ACC("free"),
    "ACC(free, kinks)": ACC("free", kinks=True),
}
MAIN, OTHER = "SGD-IE", "ACC(free)"
CHOSEN_ON = 2
"""The number of first seeds, on which the largest size of kinks was chosen; the others test it."""


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List a run for each seed and network."""
    return runs(NETWORKS, seeds, quick)


def runs(networks: Mapping[str, Settings], seeds: int, quick: bool) -> Sequence[Settings]:
    """List a run for each seed and each of these networks."""
    small = {"n": 60, "epochs": 2, "batch": 20} if quick else {}
    return [{**own, **small, "network": name, "seed": seed} for seed in range(seeds) for name, own in networks.items()]


@contextmanager
def convolutional(settings: Settings) -> Iterator[Trained]:
    """Record a run of two convolutions with average pooling on MNIST."""
    dtype = getattr(torch, settings["dtype"])
    loaded = data.load("mnist", settings["n"], settings["queries"], settings["seed"])
    train_set, val = (
        TensorDataset(part.x.view(-1, 1, 28, 28).to(dtype), part.y) for part in (loaded.train, loaded.val)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings["seed"])
        model = nn.Sequential(
            *(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.AvgPool2d(2)),
            *(nn.Conv2d(8, 8, 5), nn.ReLU(), nn.AvgPool2d(2)),
            *(nn.Flatten(), nn.Linear(8 * 4 * 4, 10)),
        ).to(dtype)
    with trained(model, train_set, val, settings) as problem:
        yield problem


def compute(settings: Settings) -> list[Row]:
    """Compute a row per method: its agreement with the truth, and the size of the kinks."""
    return compared(settings, METHODS)


def compared(settings: Settings, methods: Mapping[str, Estimator]) -> list[Row]:
    """Compare methods on one network."""
    make_problem: Any = convolutional
    if "model" in settings:
        make_problem = binary
    elif "hidden" in settings:
        make_problem = network
    with make_problem(settings) as problem:
        asked = (problem.run, problem.task, problem.val)
        ids = range(settings["replays"] or settings["n"])
        truth = Replay().score(*asked, ids=ids, resources=QUIET).mean()
        size = kink_size(Trajectory(problem.run, problem.task))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LeaveoutWarning)  # about growing vectors, which the table shows
            every = score(list(methods.values()), *asked, resources=QUIET)
        values = {name: one.mean()[: len(truth)] for name, one in zip(methods, every, strict=True)}
        spread = float(truth.double().std())
        return [
            {"method": name, "kendall": kendall(one, truth), "relative error": rmse(one, truth) / spread, "size": size}
            for name, one in values.items()
        ]


def bent(method: str) -> str:
    """Name a method with kinks.

    >>> bent("SGD-IE"), bent("ACC(free)")
    ('SGD-IE(kinks)', 'ACC(free, kinks)')
    """
    return f"{method.removesuffix(')')}, kinks)" if method.endswith(")") else f"{method}(kinks)"


def gained(frame: pd.DataFrame, methods: Sequence[str] = (MAIN, OTHER), largest: float = LARGEST) -> pd.DataFrame:
    """Tabulate tau without kinks, with them, and with them if they are mild, by network and seed.

    If the size of the kinks is not known, neither is what ``"auto"`` does.
    """
    wide = frame.pivot_table(index=["network", "seed"], columns="method", values="kendall", sort=False)
    sizes = frame if "size" in frame else frame.assign(size=float("nan"))
    wide["size"] = sizes.groupby(["network", "seed"], sort=False)["size"].first()
    for name in methods:
        wide[f"{name} always"] = wide[bent(name)] - wide[name]
        wide[f"{name} auto"] = wide[bent(name)].where(wide["size"] < largest, wide[name]).where(wide["size"].notna())
        wide[f"{name} gain"] = wide[f"{name} auto"] - wide[name]
    return wide.reset_index()


def tables(frame: pd.DataFrame) -> str:
    """Tabulate a row per network."""
    return f"{SETTING}\n\n{tabulated(frame, gained(frame), MAIN, OTHER)}"


def tabulated(frame: pd.DataFrame, wide: pd.DataFrame, main: str, other: str) -> str:
    """Tabulate a method's tau without and with kinks, its gain and errors, the size of the kinks, and another's tau."""
    rows = []
    for name, own in wide.groupby("network", sort=False):
        part = frame[frame["network"] == name]
        errors = [
            f"{part.loc[part['method'] == method, 'relative error'].median():.2f}" for method in (main, bent(main))
        ]
        sizes, always, gain = own["size"].dropna(), own[f"{main} always"], own[f"{main} gain"].dropna()
        rows.append(
            [
                *(str(name), f"{sizes.min():.2f} to {sizes.max():.2f}" if len(sizes) else "-"),
                *(spread(own[column]) for column in (main, bent(main))),
                *(f"{always.mean():+.3f}", f"{always.min():+.3f}", f"{gain.mean():+.3f}" if len(gain) else "-"),
                *(" -> ".join(errors), f"{own[other].mean():.3f} -> {own[bent(other)].mean():.3f}"),
                str(len(own)),
            ]
        )
    head = [
        *("network", "size of kinks", f"tau of {main}", "with kinks", "gain", "worst seed", "gain of auto"),
        *("RMSE/sd, median", other, "seeds"),
    ]
    return f"{table(head, rows)}\n\n{_summary(wide, main)}"


def _summary(wide: pd.DataFrame, main: str) -> str:
    known = wide[wide["size"].notna()]
    parts = (
        ("with kinks always", f"{main} always", wide),
        ("by auto", f"{main} gain", known),
        ("by auto, on seeds that did not choose its rule", f"{main} gain", known[known["seed"] >= CHOSEN_ON]),
    )
    words = []
    for name, column, part in parts:
        if part["network"].nunique() == wide["network"].nunique():  # a mean over some networks says little
            gains = part.groupby("network", sort=False)[column].mean()
            least = f"{gains.min():+.3f} ({gains.idxmin()})"
            words.append(f"Mean gain over {len(gains)} networks {name} {gains.mean():+.3f}, least {least}.")
    return " ".join(words)


def plots(frame: pd.DataFrame) -> list[Plot]:
    """Plot tau with kinks against tau without, a point per run."""
    return plotted(gained(frame), MAIN)


def plotted(wide: pd.DataFrame, main: str) -> list[Plot]:
    """Plot a method's tau with kinks against its tau without, a point per run."""
    clouds = [
        Series(str(name), own[main].tolist(), own[bent(main)].tolist(), colour, points=True)
        for colour, (name, own) in enumerate(wide.groupby("network", sort=False))
    ]
    panel = Panel("tau with exact replays, a point per seed", clouds, main, bent(main), diagonal=True)
    return [Plot("gain", f"What the curvature of kinks does to {main}", [panel])]


SETTING = """ReLU networks, SGD at 0.1, float64; tau is Kendall's, with exact replays of all examples (of 100 for the
convolutional network), mean loss of the queries. Digits: 200 examples (400 with two layers of 32 or 64), batch 50, 20
epochs. 8-8 networks with one logit: 400 examples, batch 100, 30 epochs, or 200, batch 50, 20 epochs. The convolutional
network pools by averages: 512 examples, batch 64, 6 epochs. RMSE is divided by the standard deviation of the truth. The
size of kinks is how much of a vector they can change in one step, which three quarters of eight steps reach;
`kinks="auto"` leaves them without curvature from 0.4 on. That rule was chosen on seeds 0 and 1 of all networks but the
convolutional one; other seeds test it. "-": not measured. Mean (standard deviation) over seeds."""

KINKS = Spec(
    "kinks",
    "Kinks: Hessian products in which ReLU has curvature",
    seeds=5,
    cells=cells,
    compute=compute,
    tables=tables,
    plots=plots,
    naming=("network", "seed"),
)
