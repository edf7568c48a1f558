"""Run leaveout's neighbours on the same recorded runs, compared with the same exact replays.

python run.py TOOL...       computes the cells that are not on disk yet
python run.py --report      writes table.md from those that are
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from estimate import Estimate
from subjects import QUICK, SUBJECTS, recorded

from experiments.reproduce import markdown, runner
from experiments.reproduce.spec import Row, Settings, Spec
from leaveout.evaluate.metrics import jaccard, kendall, rmse

TOOLS = ("leaveout", "captum", "dattri", "kronfluence", "trak", "pydvl", "bergson")
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
SEEDS = {"small GPT": 2, "MNIST CNN": 2}


def cells(tools: tuple[str, ...], subjects: tuple[str, ...], seeds: int, quick: bool) -> list[Settings]:
    """A cell for each seed, subject and tool."""
    return [
        {**SUBJECTS[subject], **(QUICK if quick else {}), "subject": subject, "tool": tool, "seed": seed}
        for seed in range(seeds)
        for subject in subjects
        if seed < SEEDS.get(subject, seeds)
        for tool in tools
    ]


def compute(settings: Settings) -> list[Row]:
    """A row per method: its values for the examples whose truth is known. leaveout's cell has the truth as well."""
    torch.set_num_threads(1)  # so that processor time is time
    tool = importlib.import_module(f"with_{settings['tool']}")
    with recorded(dict(settings)) as subject:
        rows = [_row(estimate, subject.ids) for estimate in _guarded(tool.estimates(subject))]
        if settings["tool"] == "leaveout":
            exact = tool.truth(subject)
            rows.append({**_row(exact, None), "ids": subject.ids})
    return rows


def _guarded(estimates: Iterator[Estimate]) -> Iterator[Estimate]:
    """Pass estimates on; a tool that fails ends its cell with what it has given so far, and says so."""
    try:
        yield from estimates
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, AssertionError) as error:
        yield Estimate(type(error).__name__, str(error).splitlines()[0][:120], torch.zeros(0), False, 0.0)


def _row(estimate: Estimate, ids: list[int] | None) -> Row:
    values = estimate.values if ids is None or not len(estimate.values) else estimate.values[ids]
    return {
        "method": estimate.method,
        "setting": estimate.setting,
        "unit": estimate.unit,
        "took": round(estimate.seconds, 3),
        "values": [float(f"{value:.6g}") for value in values.tolist()],
    }


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Compare every estimate with its cell's truth: tau, J@10, RMSE over the truth's standard deviation."""
    truths = {
        (row.subject, row.seed): torch.tensor(row["values"]) for _, row in frame[frame.method == "Replay"].iterrows()
    }
    rows: list[dict[str, Any]] = []
    for _, row in frame[frame.method != "Replay"].iterrows():
        truth = truths.get((row.subject, row.seed))
        values = torch.tensor(row["values"])
        if truth is None:
            continue
        known = len(values) == len(truth) and bool(values.isfinite().all())
        rows.append(
            {
                **{key: row[key] for key in ("subject", "seed", "tool", "method", "setting", "took")},
                "tau": kendall(values, truth) if known else np.nan,
                "jaccard": jaccard(values, truth, 10) if known else np.nan,
                "rmse": rmse(values, truth) / float(truth.double().std()) if known and row.unit else np.nan,
            }
        )
    return pd.DataFrame(rows)


def summary(results: pd.DataFrame) -> str:
    """A row per tool: the mean tau of what it gives first, and of the best of all that was tried with it."""
    subjects = [subject for subject in SUBJECTS if subject in set(results.subject)]
    rows = []
    for tool in TOOLS:
        cells_of = []
        for subject in subjects:
            part = results[(results.tool == tool) & (results.subject == subject)]
            taus = part.groupby(["method", "setting"], sort=False).tau.mean()
            if taus.notna().any():
                cells_of.append(
                    f"{taus.iloc[0]:.2f}; {taus.max():.2f}" if taus.notna().iloc[0] else f"{taus.max():.2f}"
                )
            else:
                cells_of.append("-")
        rows.append([tool, *cells_of])
    return markdown.table(["first setting; best", *subjects], rows)


def tables(frame: pd.DataFrame) -> str:
    """A summary, then a table per subject, best tau first."""
    results = compared(frame)
    pieces = [summary(results)]
    for subject in SUBJECTS:
        part = results[results.subject == subject]
        if not len(part):
            continue
        replay = frame[(frame.subject == subject) & (frame.method == "Replay")]
        rows = []
        for (tool, method, setting), group in part.groupby(["tool", "method", "setting"], sort=False):
            mean = group[["tau", "jaccard", "rmse", "took"]].mean()
            rows.append((mean.tau, [tool, method, setting, *_shown(group)]))
        rows.sort(key=lambda row: -np.nan_to_num(row[0], nan=-2))
        head = ["tool", "method", "setting", "tau", "J@10", "RMSE / sd", "seconds"]
        examples = len(replay["values"].iloc[0])
        pieces.append(
            f"## {subject}\n\nSeeds: {part.seed.nunique()}; examples: {examples}; replaying these took "
            f"{replay.took.mean():.1f} s.\n\n" + markdown.table(head, [row for _, row in rows])
        )
    return "\n\n".join(pieces)


def _shown(group: pd.DataFrame) -> list[str]:
    if group.tau.isna().all():
        return ["failed", "-", "-", "-"]
    tau = markdown.spread(group.tau)
    ratio = f"{group.rmse.mean():.2f}" if group.rmse.notna().any() else "-"
    return [tau, f"{group.jaccard.mean():.2f}", ratio, f"{group.took.mean():.1f}"]


def spec(tools: tuple[str, ...] = TOOLS, subjects: tuple[str, ...] = tuple(SUBJECTS)) -> Spec:
    """The experiment, of some tools and subjects or all."""
    naming = ("subject", "tool", "seed")
    return Spec("peers", "leaveout and its neighbours", 3, partial(cells, tools, subjects), compute, tables, naming)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", choices=[*TOOLS, []])
    parser.add_argument("--subject", choices=list(SUBJECTS), action="append", help="only this one; may be repeated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.tools:
        runner.compute(
            spec(tuple(asked.tools), tuple(asked.subject or SUBJECTS)), asked.out, asked.seeds, quick=asked.quick
        )
    if asked.report:
        frame = runner.finished(spec(), asked.out, asked.seeds, quick=asked.quick)
        folder = runner.folder_of(spec(), asked.out, quick=asked.quick)
        versions = {row["torch"] for row in (json.loads(file.read_text()) for file in (folder / "cells").iterdir())}
        origin = f"Written by `run.py --report`; torch {', '.join(sorted(versions))}, one thread, processor time."
        (folder / "table.md").write_text(f"# leaveout and its neighbours\n\n{origin}\n\n{tables(frame)}\n")


if __name__ == "__main__":
    main()
