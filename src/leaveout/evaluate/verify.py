"""Compares scores with exact replays, and exact replays with those from moved starts, on a sample of the examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset

from leaveout._util import notebook
from leaveout._util.equality import Comparable
from leaveout._util.files import free, or_null, read_json, save_csv, save_json
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, RunError, is_whole, kind_of
from leaveout.estimators.question import Question
from leaveout.estimators.replay import JITTER, Replay, replayed
from leaveout.evaluate.ceiling import GROUPS, MOVE, Ceiling, ceiling_of
from leaveout.evaluate.metrics import Agreement, Interval, compare
from leaveout.evaluate.selection import others
from leaveout.evaluate.verdict import Verdict
from leaveout.run.reader import Run
from leaveout.scores import Scores
from leaveout.task.task import Task

MINIMUM = 4
COLUMNS = ("score", "truth", "sample")
MOVES = 2
"""The number of moved starts that are replayed if scores and truth disagree, or if the scores are the truth."""
AFFORDABLE = 120.0
"""Groups are looked for by default if the replays of one size are predicted to take no more seconds than this."""

EXACT = "every score is an exact replay, nothing is estimated."


@dataclass(frozen=True, eq=False)
class Check(Comparable):
    """How far scores can be trusted, for the most extreme examples and for a random sample of the others.

    ``table`` has a row per replayed example: its score, the true change of the loss, and the sample it is in.
    ``spread`` is the standard deviation of the true changes in each sample: an RMSE well below it is good. It is NaN
    for scores that are not changes of the loss, which are compared by their order only. ``run_fingerprint`` identifies
    the run that was replayed. ``ceiling`` says how reproducible the truth is from moved starts, if that was measured;
    ``table`` then has the true change from each of them too. ``exact`` says that every score is a replay itself, so
    that only this was asked; ``replaced`` how many scores are replays already, which are not compared with themselves;
    ``queries`` over how many queries the mean was compared.
    """

    extreme: Agreement
    random: Agreement
    spread: dict[str, float]
    table: pd.DataFrame
    method: str
    cost: Cost
    run_fingerprint: int | None = None
    ceiling: Ceiling | None = None
    exact: bool = False
    replaced: int = 0
    queries: int = 1

    @property
    def verdict(self) -> Verdict:
        """How far the ranking can be trusted: the worse of both samples."""
        return Verdict.worst(*(Verdict.of(part.kendall) for part in (self.extreme, self.random)))

    @property
    def sentence(self) -> str:
        """The verdict in one sentence and, if the ceiling was measured, the cause of disagreement and what to do."""
        if self.exact:
            return f"{self.method}: {EXACT} {self.diagnosis}".rstrip()
        besides = f" of the mean over {self.queries} queries" if self.queries > 1 else ""
        besides += f" besides the {self.replaced} scores that are replays" if self.replaced else ""
        first = (
            f"{self.method}, compared with {len(self.table)} exact replays{besides}: "
            f"{self._part('extreme', self.extreme)}, and "
            f"{self._part('random', self.random)}."
        )
        return first if self.ceiling is None else f"{first} {self.diagnosis}"

    @property
    def reproducible(self) -> bool | None:
        """Say whether the replayed effects are reproducible from moved starts; None if that was not measured."""
        return None if self.ceiling is None else self.ceiling.reproducible

    @property
    def diagnosis(self) -> str:
        """Whether scores that disagree with the replays are wrong, or there is no reproducible effect to predict."""
        if self.ceiling is None:
            return ""
        if self.exact:
            return self.ceiling.of_exact()
        return self.ceiling.diagnosis(self.verdict in (Verdict.GOOD, Verdict.COARSE))

    def __str__(self) -> str:
        return self.sentence

    @property
    def short(self) -> str:
        """The verdict in a few words."""
        if not self.exact:
            return self.verdict.value
        return "exact" if self.ceiling is None else f"exact, {self.ceiling.short}"

    def __repr__(self) -> str:
        return f"Check({self.method}, {len(self.table)} exact replays: {self.short})"

    def _repr_html_(self) -> str:
        rows = [
            (name, part.count, Verdict.of(part.kendall).value, str(part.kendall), str(part.spearman), str(part.rmse))
            for name, part in (("most extreme", self.extreme), ("at random", self.random))
        ]
        heads = ("sample", "replays", "verdict", "Kendall's tau", "Spearman's rho", "RMSE")
        if self.exact:
            return notebook.card(f"{self.method}: {self.short}", [EXACT, self.diagnosis], (), [])
        title = f"{self.method}, compared with {len(self.table)} exact replays: {self.short}"
        return notebook.card(title, [self.diagnosis], heads, rows)

    def plot(self, ax: Any = None) -> Any:
        """Draw every estimate against its truth; needs matplotlib. Returns the axes."""
        ax = notebook.axes(ax)
        for name, part in self.table.groupby("sample"):
            marker, colour = ("o", notebook.HARM) if name == "extreme" else ("s", notebook.HELP)
            ax.scatter(part["score"], part["truth"], marker=marker, color=colour, label=str(name), s=18)
        ax.axline((0, 0), slope=1, color="grey", linestyle="--", linewidth=1)
        ax.set(xlabel="estimate", ylabel="truth", title=f"{self.method}: {self.short}")
        ax.legend()
        return ax

    def to_frame(self) -> pd.DataFrame:
        """Return a copy of the table, with one row per replayed example."""
        return self.table.copy()

    def to_csv(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the table to a CSV file, atomically."""
        return save_csv(path, self.table, overwrite=overwrite)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the check to one JSON file, atomically."""
        path = free(path, overwrite=overwrite)
        content = {
            "method": self.method,
            "sentence": self.sentence,
            "extreme": _plain(self.extreme),
            "random": _plain(self.random),
            "spread": {sample: or_null(value) for sample, value in self.spread.items()},
            "cost": asdict(self.cost),
            "run_fingerprint": self.run_fingerprint,
            **({"exact": True} if self.exact else {}),
            **({"replaced": self.replaced} if self.replaced else {}),
            **({"queries": self.queries} if self.queries > 1 else {}),
            **({} if self.ceiling is None else {"ceiling": self.ceiling.to_json()}),
            "table": {"train": self.table.index.tolist(), **self.table.to_dict("list")},
        }
        save_json(path, content)
        return path

    def check_same_run(self, run: Run) -> None:
        """Refuse another run than the one that was replayed."""
        if self.run_fingerprint not in (None, run.fingerprint):
            raise InputError(
                f"The check of {self.method} is of another run than {run}: verify the scores of this run.",
                code="check-of-another-run",
            )

    def check_same_scores(self, scores: Scores) -> None:
        """Refuse other scores than those that were compared with replays."""
        if self.method != scores.method:
            raise InputError(
                f"The check is of {self.method}, the scores are of {scores.method}: give the check of these scores.",
                code="check-of-other-scores",
            )
        mean = scores.mean().double()
        values = dict(zip(scores.train_ids, mean.tolist(), strict=True))
        slack = 1e-6 * float(mean.abs().max())  # a mean over queries may be rounded differently on another machine
        exact = () if scores.exact is None else scores.exact.tolist()
        replaced = {i for i, is_exact in zip(scores.train_ids, exact, strict=False) if is_exact}
        rows = zip(self.table.index, self.table["score"], self.table["truth"], strict=True)
        # A replayed row may have had its estimate compared, and then have been replaced by the truth.
        differ = (
            min(abs(values.get(i, math.inf) - score), abs(values[i] - truth) if i in replaced else math.inf)
            for i, score, truth in rows
        )
        prints = {self.run_fingerprint, scores.run_fingerprint} - {None}
        if len(prints) > 1 or any(not difference <= slack for difference in differ):
            raise InputError(
                f"The check is of other scores by {self.method} than these: verify these, and give their check.",
                code="check-of-other-scores",
            )

    @classmethod
    def load(cls, path: str | Path) -> Check:
        """Read what ``save`` wrote."""
        try:
            content = read_json(Path(path))
            rows = content["table"]
            check = cls(
                _agreement(content["extreme"]),
                _agreement(content["random"]),
                {sample: _float(value) for sample, value in content["spread"].items()},
                pd.DataFrame(
                    {name: rows[name] for name in [*COLUMNS, *(name for name in rows if name.startswith(MOVE))]},
                    index=pd.Index(rows["train"], name="train"),
                ),
                str(content["method"]),
                Cost(**content["cost"]),
                content.get("run_fingerprint"),
                Ceiling.from_json(content["ceiling"]) if "ceiling" in content else None,
                bool(content.get("exact", False)),
                int(content.get("replaced", 0)),
                int(content.get("queries", 1)),
            )
            str(check)  # fails if anything that the sentence needs is missing
            return check
        except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise RunError(
                f"{path} does not hold a check ({error}): give a file that Check.save wrote.", code="check-unreadable"
            ) from None

    def _part(self, sample: str, agreement: Agreement) -> str:
        where = f"the {agreement.count} most extreme" if sample == "extreme" else f"{agreement.count} drawn at random"
        phrase = f"tau {agreement.kendall}"
        if self.spread[sample] > 0:
            phrase += f", typical error {agreement.rmse.value / self.spread[sample]:.0%} of the truth's spread"
        return f"among {where} {Verdict.of(agreement.kendall).value} ({phrase})"


def verify(
    scores: Scores,
    run: Run,
    task: Task,
    query: Dataset,
    *,
    replays: int = 64,
    seed: int = 0,
    moves: int | None = None,
    jitter: float = JITTER,
    groups: bool | None = None,
    resources: Resources | None = None,
) -> Check:
    """Replay the run exactly without the most extreme examples, and without a random sample of the rest.

    Half of the replays go to each. Scores for several queries are compared by their mean over the queries.

    If scores disagree with the replays, either may be the cause: an effect that changes with the last digits of the
    start is not a property of the training, and no method can predict it. So the same examples are replayed from moved
    starts too, with and without each example, and the check says how reproducible the truth is: its ``ceiling``. Each
    move costs as much as the replays themselves; if single examples have no reproducible effect, a few random groups
    of growing size are replayed twice, to find the size from which on there is one.

    Rows that are exact already (``refine``, ``choose``) would be compared with themselves: the check is of the others.
    Scores that are all exact replays have nothing to be compared with. For them this is the only question: are the
    effects a property of the training, or of its last digits?

    Args:
        scores: scores of single examples or of groups.
        run: the run that was scored.
        task: what was trained.
        query: the query set that was scored.
        replays: how many examples to replay.
        seed: for the random sample, and for the moves.
        moves: from how many moved starts to replay; by default from two if the scores' ranking is only a hint or worse
            or if they are exact, and otherwise from none.
        jitter: the size of a move, relative to the initial parameters.
        groups: whether to look for the group size from which on effects are reproducible, if those of single examples
            are not: 48 more replays for every size that is tried; by default if these take no more than two minutes.
        resources: memory budget and progress.
    """
    left = _checked(scores, replays, moves)
    exact = scores.all_exact and scores.run_fingerprint == run.fingerprint and moves != 0
    extreme, random = chosen(scores, replays, seed)
    rows, question = extreme + random, Question(run, task, query, resources=resources or Resources())
    estimates = scores.mean()[rows].double().cpu().numpy()
    truth, spent = (estimates, Cost()) if exact else _true(scores, rows, question)
    table = pd.DataFrame(
        {"score": estimates, "truth": truth, "sample": ["extreme"] * len(extreme) + ["random"] * len(random)},
        index=pd.Index([scores.train_ids[row] for row in rows], name="train"),
    )
    check = _compared(table, scores, left)
    check = replace(check, cost=spent, run_fingerprint=run.fingerprint, exact=exact)
    if moves is None:
        moves = MOVES if exact or check.verdict in (Verdict.HINT, Verdict.NONE) else 0
    if not moves:
        return check
    for number in range(1, moves + 1):
        moved = Replay(move=seed + number, jitter=jitter)
        table[f"{MOVE}{number}"], cost = _true(scores, rows, question, moved)
        spent = spent + cost
    if groups is None:
        groups = spent.seconds / (len(rows) * (moves + (not exact))) * 2 * GROUPS <= AFFORDABLE
    ceiling, cost = ceiling_of(table, scores, question, seed, jitter, sizes=groups)
    return replace(check, cost=spent + cost, ceiling=ceiling)


def _checked(scores: Scores, replays: int, moves: int | None) -> int:
    """Refuse what cannot be compared; return how many scores are left to compare with replays."""
    if not isinstance(scores, Scores):
        raise InputError(
            f"Scores are needed first, not {kind_of(scores)}: call verify(scores, run, task, query).",
            code="scores-expected",
        )
    if len(scores.train_ids) < 2 * MINIMUM or not is_whole(replays, 2 * MINIMUM):
        raise InputError(
            f"verify needs at least {2 * MINIMUM} scored examples or groups, and replays: it compares rankings. For "
            "fewer, Replay().score(...) gives exact scores.",
            code="too-few-to-compare",
        )
    if moves is not None and not is_whole(moves, 0):
        raise InputError(f"moves={moves!r} must be a whole number, 0 or more, or None.", code="moves-not-a-count")
    if (left := len(comparable(scores))) < 2 * MINIMUM:
        raise InputError(
            f"Only {left} of the {len(scores.train_ids)} scores are estimates, too few to compare rankings: "
            f"refine(..., top={len(scores.train_ids)}) makes them exact too.",
            code="too-few-estimates",
        )
    return left


def _compared(table: pd.DataFrame, scores: Scores, left: int) -> Check:
    """Compare each sample's scores with the truth; ``left`` is how many scores there are to choose samples from."""
    samples = dict(iter(table.groupby("sample")))
    agreement = {name: compare(part["score"], part["truth"]) for name, part in samples.items()}
    if len(table) < left:
        agreement = {name: part.of_a_sample() for name, part in agreement.items()}
    # Scores that are not changes of the loss are compared by their order only.
    effect = scores.is_effect
    spread = {str(name): float(part["truth"].std()) if effect else math.nan for name, part in samples.items()}
    by_sample = (agreement["extreme"], agreement["random"], spread)
    replaced, queries = len(scores.train_ids) - left, len(scores.query_ids)
    return Check(*by_sample, table, scores.method, Cost(), replaced=replaced, queries=queries)


def _true(
    scores: Scores, rows: Sequence[int], question: Question, replay: Replay | None = None
) -> tuple[np.ndarray, Cost]:
    """Return the true change of the mean query loss without each row, from the start that is replayed, and the cost."""
    truth = replayed(scores, rows, question, replay)
    return truth.mean().double().cpu().numpy(), truth.cost


def comparable(scores: Scores) -> list[int]:
    """Return the rows to compare with replays, by ascending score: the estimates, or all rows if there are none."""
    order = torch.argsort(scores.mean(), stable=True).tolist()
    if scores.exact is None or scores.all_exact:
        return order
    exact = scores.exact.tolist()
    return [row for row in order if not exact[row]]


def chosen(scores: Scores, replays: int, seed: int) -> tuple[list[int], list[int]]:
    """Choose the rows to replay: half the most extreme, half from each tail, and a random sample of the rest.

    Rows that are exact replays are passed over, unless all are.
    """
    order = comparable(scores)
    replays = min(replays, len(order))
    half = max(MINIMUM, replays // 2)
    low = half // 2
    extreme = order[:low] + order[len(order) - (half - low) :]
    return extreme, others(extreme, order, replays - half, seed)


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _plain(agreement: Agreement) -> dict[str, Any]:
    def interval(of: Interval) -> dict[str, float | None]:
        return {name: or_null(value) for name, value in asdict(of).items()}

    return {
        **{name: interval(getattr(agreement, name)) for name in ("rmse", "kendall", "spearman")},
        "jaccard": {str(percent): interval(of) for percent, of in agreement.jaccard.items()},
        "count": agreement.count,
    }


def _agreement(facts: dict[str, Any]) -> Agreement:
    def interval(of: dict[str, float | None]) -> Interval:
        return Interval(**{name: _float(value) for name, value in of.items()})

    overlaps = {float(p) if "." in p else int(p): interval(of) for p, of in facts["jaccard"].items()}
    rmse, kendall, spearman = (interval(facts[name]) for name in ("rmse", "kendall", "spearman"))
    return Agreement(rmse, kendall, spearman, overlaps, int(facts["count"]))
