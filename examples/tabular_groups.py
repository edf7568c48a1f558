"""Tables with groups: which source of the data would we be better off without?

The rows of a table come from several sources, and one of them is bad: here a hospital with many wrong labels. Leaving
out a source as a whole is not the sum of leaving out its rows. Every estimate is compared with the truth: the run
retrained without the source.

    python examples/tabular_groups.py [directory]    # breast cancer; Adult where LEAVEOUT_DATA has it
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo

Groups = dict[str, list[int]]


def hospitals(seed: int = 0) -> tuple[TensorDataset, TensorDataset, Groups, str]:
    """Split the rows over six hospitals by a seeded draw; the third has about two fifths of its labels flipped."""
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    train, val = order[:400], order[400:]
    scaler = StandardScaler().fit(x[train])
    draw = np.random.default_rng(seed + 1)
    source = draw.integers(6, size=len(train))
    labels = y[train].copy()
    wrong = (source == 2) & (draw.random(len(train)) < 0.4)
    labels[wrong] = 1 - labels[wrong]
    groups = {f"hospital {name}": np.flatnonzero(source == i).tolist() for i, name in enumerate("ABCDEF")}
    parts = [(scaler.transform(x[train]), labels), (scaler.transform(x[val]), y[val])]
    first, second = (TensorDataset(torch.tensor(a).float(), torch.tensor(b).float()) for a, b in parts)
    return first, second, groups, "hospital C"


def census() -> tuple[TensorDataset, TensorDataset, Groups, str]:
    """Group people by kind of employer; everyone who works for local government has the wrong label."""
    data = lo.data.load("adult", n_train=400, n_val=400)
    named = {name: i for i, name in enumerate(data.features) if name.startswith("workclass:")}
    groups = {name: (data.train.x[:, i] > 0).nonzero().flatten().tolist() for name, i in named.items()}
    groups = {name: ids for name, ids in groups.items() if len(ids) >= 5}
    bad = "workclass:Local-gov"
    y = data.train.y.clone()
    y[groups[bad]] = 1 - y[groups[bad]]
    return TensorDataset(data.train.x, y), TensorDataset(data.val.x, data.val.y), groups, bad


def main(folder: Path, epochs: int = 30) -> dict[str, float]:
    train, val, groups, bad = census() if os.environ.get("LEAVEOUT_DATA") else hospitals()
    print(f"{len(train)} rows from {len(groups)} sources; many labels of {bad!r} are wrong")

    model = lo.models.build("logistic", seed=0, features=train.tensors[0].shape[1])
    task = lo.Task(model, nn.BCEWithLogitsLoss(), train, l2=1e-2)
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.1), epochs, 50, seed=0, out=folder / "run")

    # Leaving out a group moves the model far: use ACC (accumulative SGD-influence estimation) with exact transport, and
    # evaluate the loss at the displaced parameters.
    acc = lo.ACC("exact", readout="exact").score(run, task, val, groups=groups)
    truth = lo.Replay().score(run, task, val, groups=groups)
    single = lo.SGDIE().score(run, task, val).mean()
    table = pd.DataFrame(
        {
            "rows": [len(ids) for ids in groups.values()],
            "truth": truth.mean().numpy(),
            "ACC": acc.mean().numpy(),
            "sum of SGD-IE": [float(single[ids].sum()) for ids in groups.values()],
        },
        index=pd.Index(groups, name="source"),
    ).sort_values("ACC")
    print("\nChange of the validation loss without each source (negative: the model is better without it):")
    print(table.to_string(float_format=lambda value: f"{value:+.4f}"))
    worst = table.index[0]
    print(f"\nBetter off without: {worst!r}" if table["ACC"].iloc[0] < 0 else "\nEvery source helps.")
    errors = (table[["ACC", "sum of SGD-IE"]].sub(table["truth"], axis=0) ** 2).mean() ** 0.5
    print(f"typical error: ACC {errors['ACC']:.4f}, summed single scores {errors['sum of SGD-IE']:.4f}")
    show = lo.Show(groups=groups, title="Sources")
    page = lo.report(folder / "report.html", run, acc, task=task, query=val, show=show)
    print(f"the report: {page}")
    return {"worst is bad": float(worst == bad), **{f"error {name}": float(e) for name, e in errors.items()}}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="leaveout-")))
