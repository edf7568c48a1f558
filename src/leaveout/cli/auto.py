"""leaveout score without a method: the one chosen by measurement, stored with how it was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from leaveout.cli.app import console
from leaveout.estimators.question import Question
from leaveout.evaluate.check import Check
from leaveout.evaluate.choose import Chosen, choose
from leaveout.run.paths import RunPaths
from leaveout.scores import Scores

AUTO = "auto"
"""The name for a method chosen by measurement, and of its files."""


def automatic(question: Question, budget: float, file: Path, paths: RunPaths, *, again: bool) -> Chosen:
    """Score with the method chosen by measurement; save the scores, and the check that comes with them."""
    chosen = choose(
        *(question.run, question.task, question.query),
        budget=budget,
        queries=question.queries,
        groups=question.groups,
        resources=question.resources,
    )
    chosen.scores.save(file, overwrite=again)
    if chosen.check is not None:
        chosen.check.save(paths.check(file), overwrite=again)
    elif again:
        paths.check(file).unlink(missing_ok=True)
    return chosen


def show(chosen: Chosen) -> None:
    """Print what was chosen and the methods that were compared; exact scores need no comparison."""
    if chosen.exact:
        return
    console.print(f"\n{chosen}", highlight=False, markup=False)
    table = Table("method", title="Compared with exact replays")
    for heading in ("tau", "seconds", ""):
        table.add_column(heading, justify="right")
    for method, row in chosen.table.iterrows():
        if pd.isna(row["tau"]):
            table.add_row(str(method), "-", "-", str(row["missing"]))
        else:
            table.add_row(str(method), f"{row['tau']:.2f}", f"{row['seconds']:.1f}", "chosen" if row["chosen"] else "")
    console.print(table)


def facts(chosen: Chosen | None) -> dict[str, Any]:
    """Return the choice as plain data for JSON."""
    if chosen is None:
        return {}
    rows = chosen.table.astype(object).where(chosen.table.notna(), None).reset_index().to_dict("records")
    return {"chosen": {"sentence": chosen.sentence, "exact": chosen.exact, "methods": rows}}


def is_of_the_choice(check: Check, scores: Scores) -> bool:
    """Say whether a check came with chosen scores: all its rows were replayed and are exact there."""
    if scores.exact is None or scores.all_exact or check.method != scores.method:
        return False
    exact = {i for i, is_exact in zip(scores.train_ids, scores.exact.tolist(), strict=True) if is_exact}
    return exact.issuperset(check.table.index)
