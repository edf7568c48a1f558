"""How far scores can be trusted, as a comparison with exact replays found it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from leaveout._util import notebook
from leaveout._util.equality import Comparable
from leaveout._util.files import free, or_null, read_json, save_csv, save_json
from leaveout.compute.cost import Cost
from leaveout.errors import InputError, RunError
from leaveout.evaluate.ceiling import MOVE, Ceiling
from leaveout.evaluate.metrics import Agreement, Interval, compare
from leaveout.evaluate.verdict import Verdict
from leaveout.run.reader import Run
from leaveout.scores import Scores

MINIMUM = 4
"""The fewest rows of a sample whose ranking can be judged."""
COLUMNS = ("score", "truth", "sample")

NOTHING = "none of the replays changes the query loss; train with a learning rate above zero."
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
    ``queries`` over how many queries the mean was compared; ``omitted`` what did not fit into ``budget`` seconds, and
    which would do.
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
    omitted: str = ""
    budget: float = math.inf

    @property
    def verdict(self) -> Verdict:
        """How far the ranking can be trusted: the worse of both samples, if these are large enough to tell."""
        if min(self.extreme.count, self.random.count) < MINIMUM:
            return Verdict.FEW
        return Verdict.worst(*(Verdict.of(part.kendall) for part in (self.extreme, self.random)))

    @property
    def void(self) -> bool:
        """Whether no replay changed anything, as after a training with learning rate 0."""
        return not self.table["truth"].any()

    @property
    def bad(self) -> bool:
        """Whether the ranking is only a hint, or worse."""
        return self.verdict in (Verdict.HINT, Verdict.NONE)

    @property
    def too_few(self) -> bool:
        """Whether these replays cannot tell a ranking that is right overall from one that cannot be trusted."""
        if self.exact or self.void or self.verdict is Verdict.FEW:
            return not self.exact and not self.void
        taus = [part.kendall for part in (self.extreme, self.random)]
        wide = self.verdict is Verdict.NONE and all(tau.high >= Verdict.COARSE.least for tau in taus)
        if self.ceiling is None:
            return wide
        return self.bad and (self.ceiling.undecided or (wide and self.ceiling.reproducible))

    @property
    def sentence(self) -> str:
        """The verdict in one sentence and, if the ceiling was measured, the cause of disagreement and what to do."""
        return " ".join(part for part in (self._found, self.diagnosis, self.omitted) if part)

    @property
    def _found(self) -> str:
        if self.void or self.exact:
            return f"{self.method}: {NOTHING if self.void else EXACT}"
        besides = f" of the mean over {self.queries} queries" if self.queries > 1 else ""
        besides += f" besides the {self.replaced} scores that are replays" if self.replaced else ""
        begin = f"{self.method}, compared with {len(self.table)} exact replays{besides}: "
        if self.verdict is Verdict.FEW:
            return f"{begin}these are too few to tell how far the ranking can be trusted."
        few = f" {len(self.table)} replays are too few to tell: verify with more." if self.too_few else ""
        return f"{begin}{self._part('extreme', self.extreme)}, and {self._part('random', self.random)}.{few}"

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
        return self.ceiling.diagnosis(not self.bad, few=self.too_few)

    @property
    def truths(self) -> dict[int | str, float]:
        """The true change without each row that was replayed."""
        return dict(zip(self.table.index.tolist(), self.table["truth"].tolist(), strict=True))

    def __str__(self) -> str:
        return self.sentence

    @property
    def short(self) -> str:
        """The verdict in a few words."""
        if self.void:
            return "no example has any effect"
        if not self.exact:
            return f"{len(self.table)} replays are too few to tell" if self.too_few else self.verdict.value
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
            return notebook.card(f"{self.method}: {self.short}", [EXACT, self.diagnosis, self.omitted], (), [])
        title = f"{self.method}, compared with {len(self.table)} exact replays: {self.short}"
        return notebook.card(title, [self.diagnosis, self.omitted], heads, rows)

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
            **({"omitted": self.omitted} if self.omitted else {}),
            **({"budget": self.budget} if math.isfinite(self.budget) else {}),
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
                str(content.get("omitted", "")),
                float(content.get("budget", math.inf)),
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


def agreement_of(part: pd.DataFrame, *, sampled: bool = False) -> Agreement:
    """Compare scores with the truth in one sample; if there are fewer than two rows, nothing is known."""
    if len(part) < 2:
        nothing = Interval(math.nan, math.nan, math.nan)
        return Agreement(nothing, nothing, nothing, {}, len(part))
    agreement = compare(part["score"], part["truth"])
    return agreement.of_a_sample() if sampled else agreement


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
