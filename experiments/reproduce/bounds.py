"""Measured errors of the displacements compared with the published bounds, and how they grow for networks.

Both theorems bound ‖E‖, the distance between the true displacement δ_k after N steps and its estimate. For logistic
regression with L2 every constant is known from the data, with x̃ = (x, 1) and B = max‖x̃‖:

    λ = l2,   Λ = l2 + B²/4,   L = B³/(6√3),   G = B + l2·R,   R = max(‖θ_0‖, B/l2)

R bounds ‖θ‖ along every training with α·l2 ≤ 1, since θ ← (1 − α·l2)θ − α·(mean of gradients no longer than B).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from experiments.reproduce.along import displaced, replayed
from experiments.reproduce.markdown import number, table
from experiments.reproduce.plots import Panel, Plot, Series
from experiments.reproduce.problems import Problem, trained
from experiments.reproduce.spec import Row, Settings, Spec
from leaveout._util.trees import PARAM, Params
from leaveout.builtin import data, models
from leaveout.builtin.data import Examples

ESTIMATES = {"SGD-IE": False, "ACC(exact)": True}
CONDITIONS = {
    "inside": {"l2": 0.1, "lr": 1.0},
    "small batch": {"l2": 0.01, "lr": 1.0},
    "long step": {"l2": 0.1, "lr": 3.0},
}
GAMMA = 1.0


def cells(seeds: int, quick: bool) -> Sequence[Settings]:
    """List logistic regression inside and outside the theorem's conditions, and networks with one run per length."""
    n, last = (60, {"adult": 8, "mnist-1v7": 8}) if quick else (200, {"adult": 512, "mnist-1v7": 128})
    marks = [1, 2, 4, 8, 16, 32, 64, 128, 512]
    shared = {"n": n, "batch": n // 2}
    convex = [
        {"kind": "convex", "data": name, "model": "logistic", "conditions": where, **shared, **CONDITIONS[where]}
        for name in ("adult", "mnist-1v7")
        for where in CONDITIONS
    ]
    grown = [
        {"kind": "nonconvex", "data": "adult", "model": model, "conditions": "", **shared, "l2": 0.0, "lr": GAMMA}
        for model in ("relu", "tanh")
    ]
    return [
        {
            **cell,
            "epochs": [m for m in marks if m <= min(last[str(cell["data"])], 512 if cell["conditions"] else 64)],
            "seed": seed,
        }
        for seed in range(seeds)
        for cell in [*convex, *grown]
    ]


def compute(settings: Settings) -> list[Row]:
    """Return a row for each length of training and estimator."""
    return _convex(settings) if settings["kind"] == "convex" else _nonconvex(settings)


def _convex(settings: Settings) -> list[Row]:
    train, val = _unit(settings)
    model = models.build("logistic", seed=settings["seed"], features=train.x.shape[1]).double()
    each = -(-settings["n"] // settings["batch"])
    marks = [epochs * each for epochs in settings["epochs"]]
    rows: list[Row] = []
    with trained(model, nn.BCEWithLogitsLoss(), train, val, {**settings, "epochs": settings["epochs"][-1]}) as problem:
        factors = constants(train.x, problem.run.state(0)[PARAM], settings["l2"])
        since = torch.tensor(marks)[:, None] - _first(problem)[None]
        bounds = convex_bounds(factors, settings["lr"], settings["batch"], since)
        for method, errors in _errors(problem, marks).items():
            for place, (step, norms) in enumerate(errors.items()):
                error, bound = norms["error"], bounds[method][place]
                rows.append(
                    {
                        "steps": step,
                        "method": method,
                        **_spread(norms),
                        "bound": float(bound.mean()),
                        "above": float((error > bound).double().mean()),
                        "worst": float((error / bound).max()),
                        "holds": conditions(factors, settings["lr"], settings["batch"]),
                        **factors,
                    }
                )
    return rows


def _nonconvex(settings: Settings) -> list[Row]:
    rows: list[Row] = []
    train, val = _unit(settings)
    each = -(-settings["n"] // settings["batch"])
    for epochs in settings["epochs"]:
        steps = epochs * each
        model = models.build("mlp", seed=settings["seed"], features=train.x.shape[1]).double()
        if settings["model"] == "tanh":
            model = nn.Sequential(*(nn.Tanh() if isinstance(layer, nn.ReLU) else layer for layer in model.children()))
        chosen = {**settings, "epochs": epochs, "lr": settings["lr"] / math.sqrt(steps)}
        with trained(model, nn.BCEWithLogitsLoss(), train, val, chosen) as problem:
            for method, errors in _errors(problem, [steps]).items():
                rows.append({"steps": steps, "method": method, **_spread(errors[steps])})
    return rows


def constants(x: Tensor, start: Params, l2: float) -> dict[str, float]:
    """Compute λ, Λ, L and G of logistic regression on these inputs, trained from this start."""
    longest = float((x.square().sum(1) + 1).sqrt().max())
    radius = max(math.sqrt(sum(float(t.square().sum()) for t in start.values())), longest / l2)
    return {
        "lambda": l2,
        "Lambda": l2 + longest**2 / 4,
        "L": longest**3 / (6 * math.sqrt(3)),
        "G": longest + l2 * radius,
    }


def conditions(factors: dict[str, float], lr: float, batch: int) -> bool:
    """Say whether the theorem's assumptions on batch size and learning rate hold."""
    low, high, rough, steep = factors["lambda"], factors["Lambda"], factors["L"], factors["G"]
    longest = min(1 / high, batch * low / (4 * high**2), batch * low / (2 * steep * rough))
    return batch >= 4 * high / low and lr <= longest


def convex_bounds(factors: dict[str, float], lr: float, batch: int, since: Tensor) -> dict[str, Tensor]:
    """Compute 2G/(λM) · 1/(N−π) for SGD-IE, αG/M · (1 − αλ/2)^(N−π−1) for ACC, N−π steps since the first occurrence."""
    low, steep = factors["lambda"], factors["G"]
    return {
        "SGD-IE": 2 * steep / (low * batch) / since,
        "ACC(exact)": lr * steep / batch * (1 - lr * low / 2) ** (since - 1),
    }


def _unit(settings: Settings) -> tuple[Examples, Examples]:
    """Load the data in float64, scaled so that the longest training row has length one."""
    dataset = data.load(settings["data"], n_train=settings["n"], n_val=settings["n"], seed=settings["seed"])
    scale = dataset.train.x.double().norm(dim=1).max()
    train, val = (Examples(p.x.double() / scale, p.y.double(), p.ids) for p in (dataset.train, dataset.val))
    return train, val


def _first(problem: Problem) -> Tensor:
    """Return the first step that uses each example."""
    first = torch.full((problem.task.size,), -1)
    for step in range(len(problem.run)):
        ids = problem.run.record(step).ids
        first[ids] = torch.where(first[ids] < 0, step, first[ids])
    return first


def _errors(problem: Problem, marks: Sequence[int]) -> dict[str, dict[int, dict[str, Tensor]]]:
    """Compute ‖E‖ and ‖δ‖ of every example, by estimator and number of steps."""
    truth = {step: _flat(moved) for step, moved in replayed(problem, marks)}
    return {
        method: {
            step: {"error": (truth[step] - _flat(moved)).norm(dim=1), "moved": truth[step].norm(dim=1)}
            for step, moved in displaced(problem, marks, corrected=corrected)
        }
        for method, corrected in ESTIMATES.items()
    }


def _flat(moved: Params) -> Tensor:
    return torch.cat([tensor.flatten(1) for tensor in moved.values()], dim=1).clone()


def _spread(norms: dict[str, Tensor]) -> dict[str, float]:
    error, moved = norms["error"], norms["moved"]
    return {
        "error": float(error.mean()),
        "largest": float(error.max()),
        "relative": float((error / moved.clamp_min(1e-300)).median()),
    }


def tables(frame: pd.DataFrame) -> str:
    """Tabulate measured errors and bounds for logistic regression, and the growth for the networks."""
    convex, grown = frame[frame["kind"] == "convex"], frame[frame["kind"] == "nonconvex"]
    rows = []
    for (name, where, method, steps), part in convex.groupby(["data", "conditions", "method", "steps"], sort=False):
        mean: Any = part[["error", "largest", "relative", "bound", "above"]].mean()
        shown = [number(mean[c], True) for c in ("error", "largest", "bound")]
        holds = "yes" if part["holds"].all() else "no"
        worst = "-" if part["worst"].isna().any() else f"{float(part['worst'].max()):.2g}"
        columns = [f"{mean['relative']:.1%}", f"{mean['above']:.1%}", worst, str(part["seed"].nunique())]
        rows.append([str(name), str(where), holds, str(method), str(steps), *shown, *columns])
    head = ["data", "case", "conditions hold", "method", "steps", "mean error", "largest", "mean bound"]
    text = f"{CONVEX}\n\n" + table(
        [*head, "error of displacement", "examples above bound", "largest error / bound", "seeds"], rows
    )
    rows = []
    for (model, method, steps), part in grown.groupby(["model", "method", "steps"], sort=False):
        columns = [number(float(part[c].mean()), True) for c in ("error", "largest")]
        relative = f"{float(part['relative'].mean()):.1%}"
        rows.append([str(model), str(method), str(steps), *columns, relative, str(part["seed"].nunique())])
    head = ["activation", "method", "steps", "mean error", "largest", "error of displacement", "seeds"]
    return f"{text}\n\n## Networks\n\n{GROWTH}\n\n{table(head, rows)}"


def plots(frame: pd.DataFrame) -> list[Plot]:
    """Plot errors and bounds over the number of steps."""
    panels = []
    for (_, name, where, model), part in frame.groupby(["kind", "data", "conditions", "model"], sort=False):
        lines = []
        for colour, method in enumerate(ESTIMATES):
            by = part[part["method"] == method].groupby("steps")
            measured = by["error"].mean()
            lines.append(Series(method, list(measured.index), list(measured), colour))
            if where:
                bound = by["bound"].mean()
                lines.append(Series(f"bound of {method}", list(bound.index), list(bound), colour, dashed=True))
        title = f"{name}, logistic, {where}" if where else f"{name}, 8-8 {model}, step γ/√N"
        panels.append(Panel(title, lines, "steps", "mean ‖E‖", log_x=True, log_y=True))
    return [Plot("bounds", "Error of the displacements: measured, and bounds where their constants are known", panels)]


CONVEX = """Logistic regression with L2, 200 examples scaled so that the longest has length one, batch 100, float64.
‖E‖ is the distance between the true displacement of the parameters (exact replay) and its estimate, for every example.
"inside": L2 0.1, learning rate 1. "small batch": L2 0.01, where the theorem asks for a larger batch. "long step":
learning rate 3, above 1/Λ. The bounds are those of the strongly convex theorem, with constants from the data."""
GROWTH = """The 8-8 network on Adult with ReLU and with tanh, step size 1/√N for a run of N steps, each N a run of
its own. The non-convex bounds grow as exp(γΛ√N); for ReLU the constant L of the theorem does not exist."""

BOUNDS = Spec(
    "bounds",
    "Bounds: errors of the displacements against the published bounds",
    seeds=3,
    cells=cells,
    compute=compute,
    tables=tables,
    plots=plots,
    naming=("kind", "data", "model", "conditions", "seed"),
)
