"""The texts of a report, in plain words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from leaveout.evaluate.check import Check
from leaveout.evaluate.metrics import kendall
from leaveout.evaluate.verdict import Verdict
from leaveout.reporting.content import Table, Verdicts
from leaveout.run.reader import Run
from leaveout.scores import MEAN, SELF, UNIT, Scores
from leaveout.task.task import Task

ALIKE = 0.8
"""Two methods with at least this rank correlation count as agreeing."""


def trained(run: Run, task: Task | None) -> str:
    """Say what was trained, and how."""
    records = [run.record(i) for i in range(len(run))]
    epochs = len({record.epoch for record in records})
    sizes = Counter(len(record.ids) for record in records)
    size = run.manifest.train_size or (task.size if task else None)
    on = f" on {size:,} examples" if size else ""
    long = f" for {epochs:,} epochs" if epochs > 1 else ""
    batch = f"batches of {sizes.most_common(1)[0][0]:,}"
    rates = [record.hypers[0]["lr"] for record in records]
    rate = f"{rates[0]:.3g}" if min(rates) == max(rates) else f"between {min(rates):.3g} and {max(rates):.3g}"
    what = f"A model ({model_name(task.model)})" if task else "A model"
    return (
        f"{what} with {parameters(run):,} parameters was trained{on}{long}: {len(run):,} steps of "
        f"{run.rule.definition.phrase(records[0].hypers[0])} with learning rate {rate} and {batch}."
    )


def parameters(run: Run) -> int:
    """Count the trained parameters."""
    return sum(math.prod(run.manifest.shapes[name]) for name in run.rule.groups)


def model_name(model: nn.Module) -> str:
    """Name the model's class; a sequential model by its layers.

    >>> model_name(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    'Linear, Tanh, Linear'
    """
    if not isinstance(model, nn.Sequential):
        return type(model).__name__
    names = [type(part).__name__ for part in model]
    return ", ".join(names) if len(names) <= 8 else f"{len(names)} layers"


def scored(scores: Scores, queries: int | None, *, groups: bool) -> str:
    """Say what was estimated."""
    whose = "every group" if groups else "every training example"
    on = f"{queries:,} query examples" if queries else "the query examples"
    what = f"the mean loss on {on}" if scores.queries == MEAN else f"the loss on each of {on}"
    if scores.queries == SELF:
        what = "its own loss"
    if scores.unit != UNIT:
        return f"{scores.method} ranked {whose} by its effect on {what}, measured in {scores.unit}."
    how = "measured by exact replays" if scores.all_exact else "estimated"
    mixed = f" Mixed precision: {scores.mixed}." if scores.mixed else ""
    held = f" {scores.held}." if scores.held else ""
    return f"{scores.method} {how}, for {whose}, how {what} would change had it been left out of training.{mixed}{held}"


def outcome(
    table: Table,
    score: Sequence[float],
    exact: Sequence[bool],
    total: int,
    harmful: int,
    *,
    groups: bool,
    loss: bool,
    sure: bool,
) -> str:
    """Say how many did harm, and name the worst, by place in the table: among replayed rows, if there are any.

    An estimate is named only if nothing was replayed: it might contradict the exact values beside it. Unless it is
    ``sure`` that effects are what they seem, only the signs of the scores are counted: half of all noise is below zero.
    """
    what = "groups" if groups else "examples"
    if not harmful:
        return f"None of the {total:,} {what} has a score below zero."
    begin = f"{harmful:,} of the {total:,} {what} {'did harm' if sure else 'have a score below zero'}."
    worst, replayed = min(range(len(score)), key=score.__getitem__), [i for i, sure in enumerate(exact) if sure]
    which = "The most harmful is"
    if replayed and not exact[worst]:
        worst = min(replayed, key=score.__getitem__)
        if score[worst] >= 0:
            return f"{begin[:-1]}, but none of the {len(replayed):,} that were replayed exactly."
        which = f"Of the {len(replayed):,} that were replayed exactly, the most harmful is"
    named = ""
    if table.label and table.label[worst] >= 0:
        named = f" ({'labelled' if table.p else 'target'} {table.names[table.label[worst]]}"
        says = table.says[worst]
        named += f", the model says {table.names[says]})" if says != table.label[worst] else ")"
    brought = f"without it the loss {'falls' if exact[worst] else 'would fall'} by {-score[worst]:.3g}"
    brought += ", replayed exactly" if exact[worst] else ", by its estimate"
    if not loss:
        brought = f"its score is {score[worst]:.3g}, which ranks it but does not say how much the loss would change"
    return f"{begin} {which} {table.id[worst]}{named}: {brought}."


def verdicts(scores: Sequence[Scores], checks: Mapping[str, Check]) -> Verdicts:
    """Return a row per method: verdict, rank correlation in both samples, typical error, time."""
    rows = []
    for one in scores:
        check, seconds = checks.get(one.method), f"{one.cost.seconds:.1f} s"
        if one.all_exact:
            words = check.short if check is not None and check.exact else "exact: nothing is estimated"
            rows.append([one.method, words, "", "", "", seconds])
        elif check is None:
            rows.append([one.method, "not verified", "", "", "", seconds])
        else:
            parts = ((check.extreme, check.spread["extreme"]), (check.random, check.spread["random"]))
            errors = ", ".join(f"{part.rmse.value / spread:.0%}" for part, spread in parts if spread > 0)
            taus = ["" if check.verdict is Verdict.FEW else str(part.kendall) for part, _ in parts]
            rows.append([one.method, check.short, *taus, errors, seconds])
    heads = ["Method", "Verdict", "Tau, most extreme", "Tau, at random", "Typical error, of the spread", "Scoring took"]
    return Verdicts(heads, rows)


def timing(sums: Sequence[float], scores: Sequence[float], method: str) -> str:
    """Say how far to trust the times at which influence arose, which are SGD-IE's whatever the method of the scores.

    >>> timing([1.0, 2.0, 3.0, 4.0], [4.0, 1.0, 3.0, 2.0], "Replay")
    'SGD-IE gives a different ranking from Replay (tau -0.33), so take the times at which influence arose as a hint.'
    >>> timing([1.0, 2.0, 3.0], [1.0, 2.0, 3.5], "Replay")
    ''
    """
    tau = kendall(sums, scores)
    if not tau < ALIKE:
        return ""
    return (
        f"SGD-IE gives a different ranking from {method} (tau {tau:.2f}), so take the times at which influence arose "
        "as a hint."
    )


def measures(check: Check) -> list[tuple[str, str, str]]:
    """Return each measure with its interval, for the most extreme scores and for those drawn at random."""
    extreme, random = check.extreme, check.random
    rows = [
        ("replayed", str(extreme.count), str(random.count)),
        ("Kendall's tau", str(extreme.kendall), str(random.kendall)),
        ("Spearman's rho", str(extreme.spearman), str(random.spearman)),
    ]
    if not math.isnan(check.spread["extreme"]):  # scores in another unit than the loss have no RMSE
        rows.append(("typical error (RMSE)", str(extreme.rmse), str(random.rmse)))
        rows.append(("spread of the true changes", f"{check.spread['extreme']:.2g}", f"{check.spread['random']:.2g}"))
    shared = [percent for percent in extreme.jaccard if percent in random.jaccard]
    return rows + [
        (f"overlap of the top {percent:g}%", str(extreme.jaccard[percent]), str(random.jaccard[percent]))
        for percent in shared
    ]
