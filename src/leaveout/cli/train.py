"""leaveout train."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from leaveout._util.files import or_null
from leaveout._util.leftovers import tidy, unlock
from leaveout.builtin import config as lo_config
from leaveout.builtin import data as lo_data
from leaveout.builtin import models
from leaveout.builtin.config import Config, Subject
from leaveout.cli.app import AsJson, claimed, complaints, console, print_json, print_next, resumable
from leaveout.cli.commands import app
from leaveout.cli.facts import Outcome, keep, kept
from leaveout.cli.outcome import measured
from leaveout.errors import RunError
from leaveout.run.manifest import MANIFEST, cut_short, read_manifest
from leaveout.run.paths import RunPaths
from leaveout.run.reader import Run, open_run


@app.command()
def train(
    out: Annotated[
        Path | None, typer.Option(help="A new directory for the run; runs/<data>-<model> by default.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file to start from, such as a run's config.toml.")] = None,
    data: Annotated[str | None, typer.Option(help=f"Data set: {', '.join(lo_data.names())}.")] = None,
    n_train: Annotated[int | None, typer.Option(help="How many training examples.")] = None,
    n_val: Annotated[int | None, typer.Option(help="How many validation examples (the queries).")] = None,
    flip: Annotated[float | None, typer.Option(help="Fraction of training labels to make wrong.")] = None,
    model: Annotated[str | None, typer.Option(help=f"Model: {', '.join(models.names())}.")] = None,
    hidden: Annotated[str | None, typer.Option(help="Widths of the mlp's hidden layers, like 16 or 32,16.")] = None,
    activation: Annotated[str | None, typer.Option(help=f"Of the mlp: {', '.join(models.ACTIVATIONS)}.")] = None,
    optimizer: Annotated[str | None, typer.Option(help=f"{', '.join(lo_config.OPTIMIZERS)}.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of an optimizer that has it.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of the optimizer.")] = None,
    l2: Annotated[float | None, typer.Option(help="Strength of an L2 term in each example's loss.")] = None,
    epochs: Annotated[int | None, typer.Option(help="How often every example is seen.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per step.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the split, the initial weights and the batches.")] = None,
    keep: Annotated[str | None, typer.Option(help="States to keep: all, auto, or K for every K-th.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train and record a built-in model on a built-in data set.

    [dim]$[/dim] leaveout train --data digits --flip 0.1 --hidden 16 --activation tanh --out runs/digits

    [dim]$[/dim] leaveout train --data mnist --model mnist-cnn --n-train 5000 --epochs 20 --out runs/mnist

    The directory keeps the config that made it, which repeats the run bit by bit:

    [dim]$[/dim] leaveout train --config runs/digits/config.toml --out runs/again

    Options beside a config replace what it says. Your own model needs no command: see lo.Recorder.
    """
    overrides: dict[str, dict[str, Any]] = {
        "data": {"name": data, "n_train": n_train, "n_val": n_val, "flip": flip, "seed": seed},
        "model": {"name": model, "hidden": _widths(hidden), "activation": activation, "seed": seed},
        "optimizer": {"name": optimizer, "lr": lr, "momentum": momentum, "weight_decay": weight_decay},
        "train": {"epochs": epochs, "batch_size": batch_size, "l2": l2, "seed": seed, "keep": _keep(keep)},
    }
    plan = _with(lo_config.read(config) if config else Config(), overrides)
    path = out or Path("runs") / f"{plan.data.name}-{plan.model.name}"
    with resumable(lambda: _kept(path)):
        run, outcome = _there(plan, path) or _trained(plan, path)
    content = {"run": str(run.path), "steps": len(run), "states_kept": len(run.kept), **_plain(outcome.numbers)}
    if as_json:
        print_json({**content, "config": str(RunPaths(run.path).config), "warning": outcome.warning})
        return
    console.print(f"{len(run)} steps are recorded in {run.path}.", highlight=False, markup=False)
    console.print(outcome.sentence, highlight=False, markup=False)
    if outcome.warning:
        complaints.print(outcome.warning, style="yellow", markup=False)
    print_next("labels", path, None)
    print_next("score", path, None)


def _plain(numbers: dict[str, float | None]) -> dict[str, float | None]:
    return {name: or_null(value) for name, value in numbers.items()}


def _kept(path: Path) -> str:
    """Say what an interrupted training leaves behind."""
    if (path / MANIFEST).exists() and read_manifest(path).shards:
        return f"The steps up to here are kept in {path}; the same command continues from there."
    return "No step was kept yet; the same command begins again."


def _there(plan: Config, path: Path) -> tuple[Run, Outcome] | None:
    """Return the finished run of this config and its outcome, if the directory already holds it."""
    file = RunPaths(path).config
    if not file.exists() or not (path / MANIFEST).exists() or cut_short(path) or lo_config.read(file) != plan:
        return None
    unlock(path)
    run = open_run(path)
    facts = kept(run)
    if facts is not None and facts.outcome is not None:
        tidy([RunPaths(path).training])
        return run, facts.outcome
    subject = lo_config.prepare(plan)
    outcome = measured(run, subject)
    with suppress(RunError):  # the run may be of somebody who lets others only read it
        _store(run, subject, outcome)
    return run, outcome


def _trained(plan: Config, path: Path) -> tuple[Run, Outcome]:
    run, subject = lo_config.run_config(plan, path)
    outcome = measured(run, subject)
    _store(run, subject, outcome)
    return run, outcome


def _store(run: Run, subject: Subject, outcome: Outcome) -> None:
    with claimed([RunPaths(run.path).training]):
        keep(run, subject, outcome)


def _with(base: Config, overrides: dict[str, dict[str, Any]]) -> Config:
    """Return the config with the given options in place of its own values."""
    parts = {
        name: replace(getattr(base, name), **{key: value for key, value in options.items() if value is not None})
        for name, options in overrides.items()
    }
    return replace(base, **parts)


def _widths(hidden: str | None) -> list[int] | None:
    try:
        return None if hidden is None else [int(width) for width in hidden.split(",") if width.strip()]
    except ValueError:
        raise typer.BadParameter(f"{hidden!r} is not a list of widths like 32,16.", param_hint="--hidden") from None


def _keep(keep: str | None) -> str | int | None:
    return int(keep) if keep is not None and keep.isdigit() else keep
