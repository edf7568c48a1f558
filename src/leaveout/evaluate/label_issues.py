"""Labels to check, as a table: which look wrong, and why."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from leaveout._util import notebook
from leaveout._util.equality import Comparable
from leaveout._util.files import free, read_json, save_csv, save_json
from leaveout.errors import InputError, RunError
from leaveout.evaluate.dynamics import MEMORISED, STATES
from leaveout.run.reader import Run
from leaveout.scores import LABELS, MEAN, Scores

UNLEARNED = 0.4
"""If a run mispredicts more than this share of its labels, it is more often the model that is wrong."""
WEAK = 0.8
"""Held-out trainings that agree with less than this share of the labels are weak judges of them."""
FOLDS, BUDGET = 5, 60.0
"""The number of trainings that judge labels out of sample if the run may have memorised them, and their seconds."""
AUTO = "auto"
MEASURES = ("margin", "loss", "probability", "variability", "forgotten")
COLUMNS = (
    *("is_label_issue", "label_score", "given_label", "predicted_label", "why"),
    *MEASURES,
    *("learned_epoch", "conflicts_with"),
)


@dataclass(frozen=True)
class Question:
    """The options that labels were computed with, so that a stored result can be found again."""

    states: int = STATES
    folds: int | str | None = AUTO
    seed: int = 0
    influence: str | None = None


@dataclass(frozen=True, eq=False)
class Labels(Comparable):
    """Which labels look wrong. ``len(labels)`` is how many do.

    ``table`` has a row per training example: ``is_label_issue``, ``label_score`` (0 to 1, low is likely wrong),
    ``given_label`` and ``predicted_label`` as cleanlab's Datalab has them (for an issue the most likely *other*
    label), and ``why``; then what the run showed: ``margin`` and ``loss`` averaged over the states, mean
    ``probability`` of the given label and its ``variability``, how often it was ``forgotten``, the
    ``learned_epoch`` from which on it was predicted (missing if it never was), and an example with the same input and
    another label in ``conflicts_with``. ``weight`` is how much influence counted besides the margins; ``misfit`` the
    share of labels that the run's last state does not predict; ``folds`` the number of trainings that judged the labels
    out of sample, None if the recorded states did; ``too_long`` the seconds that such trainings were predicted to take,
    if they would have been useful but did not fit the budget.
    """

    table: pd.DataFrame
    question: Question
    weight: float
    misfit: float
    run_fingerprint: int | None = None
    folds: int | None = None
    too_long: float | None = None

    def __len__(self) -> int:
        return int(self.table["is_label_issue"].sum())

    @property
    def issues(self) -> pd.DataFrame:
        """The rows of the labels that look wrong, the most suspicious first."""
        ranked = self.ranked()
        return ranked[ranked["is_label_issue"]]

    @property
    def ids(self) -> list[int]:
        """The examples whose labels look wrong, the most suspicious first."""
        return self.issues.index.tolist()

    def ranked(self, k: int | None = None) -> pd.DataFrame:
        """Return the k most suspicious rows, whether or not they count as issues; all by default."""
        return self.table.sort_values("label_score", kind="stable")[:k]

    def changes(self, k: int | None = None) -> list[str]:
        """List the most frequent changes among the issues, as in "6 → 9: 4", most frequent first."""
        issues = self.issues
        pairs = Counter(f"{a} → {b}" for a, b in zip(issues["given_label"], issues["predicted_label"], strict=True))
        return [f"{change}: {times}" for change, times in pairs.most_common(k)] + (
            ["..."] if k and len(pairs) > k else []
        )

    @property
    def sentence(self) -> str:
        """The result in a sentence."""
        count = len(self)
        answer = f"{count or 'None'} of {len(self.table)} labels {'looks' if count < 2 else 'look'} wrong"
        answer += " to a weak model" if self.doubtful else ""
        if count:
            answer += f" ({', '.join(self.changes(3))})"
        return f"{answer}.{f' {self.advice}' if self.advice else ''}"

    @property
    def agreed(self) -> float:
        """The share of the given labels that the judging states, or trainings, predict too."""
        return float((self.table["given_label"] == self.table["predicted_label"]).mean())

    @property
    def doubtful(self) -> bool:
        """Say whether the model is too weak a judge for the count to be believed."""
        return self.misfit > UNLEARNED or (bool(self.folds) and self.agreed < WEAK)

    @property
    def advice(self) -> str:
        """How labels were judged, or should be, if the run's own margins say little."""
        if self.misfit > UNLEARNED:
            return (
                f"The trained model predicts only {1 - self.misfit:.1%} of the given labels: where it has not learned "
                "the task, it is the model that is wrong, not the label. Train longer, or with another learning rate, "
                "before you believe this count."
            )
        fitted = f"The trained model predicts {1 - self.misfit:.1%} of the given labels"
        if self.question.folds == AUTO and self.folds:
            return f"{fitted}, so each was judged by a training that did not see it ({self.folds} folds).{self._doubt}"
        if self.folds is not None or self.misfit >= MEMORISED:
            return self._doubt.strip()
        minutes = 0 if self.too_long is None else math.ceil(self.too_long / 60)
        long = "" if not minutes else f", in about {minutes} minute{'s' * (minutes > 1)}"
        return (
            f"{fitted}: if it would not do so on new examples, it has memorised them, and folds={FOLDS} "
            f"(--folds {FOLDS}) judges them out of sample{long}."
        )

    @property
    def _doubt(self) -> str:
        """A warning if the held-out trainings agree with few labels: they are weak judges then."""
        if not self.doubtful:
            return ""
        return (
            f" The {self.folds} retrained models agree with only {self.agreed:.1%} of the labels: unless that many of "
            "your labels are wrong, it is mostly the models that are wrong. Look at the first few only."
        )

    def __repr__(self) -> str:
        return f"Labels({len(self)} of {len(self.table)} look wrong)"

    def __str__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        columns = ["given_label", "predicted_label", "label_score", "why"]
        rows = [(number, *row) for number, *row in self.issues[:10][columns].itertuples()]
        return notebook.card(f"{len(self)} labels look wrong", [self.sentence], ("train", *columns), rows)

    def plot(self, ax: Any = None) -> Any:
        """Draw how often each given label looks like each other label; needs matplotlib. Returns the axes."""
        issues = self.issues
        counts = pd.crosstab(issues["given_label"].astype(str), issues["predicted_label"].astype(str))
        ax = notebook.axes(ax)
        ax.imshow(counts.to_numpy(), cmap="Oranges")
        ax.set_xticks(range(counts.shape[1]), counts.columns)
        ax.set_yticks(range(counts.shape[0]), counts.index)
        ax.set(xlabel="suggested label", ylabel="given label", title=f"{len(self)} labels look wrong")
        return ax

    def check_same_run(self, run: Run) -> None:
        """Refuse another run than the one whose labels were judged."""
        if self.run_fingerprint not in (None, run.fingerprint):
            raise InputError(
                f"The labels are of another run than {run}: give those of this run.", code="labels-of-another-run"
            )

    def to_scores(self) -> Scores:
        """Return the ranking of the labels as scores, so that ``cleanse`` can remove those that look wrong.

        They are negative only for the issues, and lowest for the most suspicious.
        """
        values = self.table["label_score"].to_numpy(dtype=float) - 1.000001 * self.table["is_label_issue"].to_numpy()
        ids = tuple(int(i) for i in self.table.index)
        column = torch.from_numpy(values)[:, None]
        return Scores(column, ids, (MEAN,), LABELS, unit="label score", run_fingerprint=self.run_fingerprint)

    def to_frame(self) -> pd.DataFrame:
        """Return a copy of the table, with one row per training example in order."""
        return self.table.copy()

    def to_csv(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the table to a CSV file, atomically."""
        return save_csv(path, self.table, overwrite=overwrite)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the labels to one JSON file, atomically."""
        path = free(path, overwrite=overwrite)
        table = self.table.astype(object).where(self.table.notna(), None)
        content = {
            "sentence": self.sentence,
            "question": asdict(self.question),
            "weight": self.weight,
            "misfit": self.misfit,
            "run_fingerprint": self.run_fingerprint,
            "folds": self.folds,
            "too_long": self.too_long,
            "table": table.to_dict("list"),
        }
        save_json(path, content)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Labels:
        """Read what ``save`` wrote."""
        try:
            content = read_json(Path(path))
            columns = {name: content["table"][name] for name in COLUMNS}
            labels = cls(
                table_of(columns),
                Question(**content["question"]),
                float(content["weight"]),
                float(content["misfit"]),
                content["run_fingerprint"],
                content.get("folds"),
                content.get("too_long"),
            )
            str(labels)  # fails if anything that the sentence needs is missing
            return labels
        except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise RunError(
                f"{path} does not hold labels ({error}): give a file that Labels.save wrote.", code="labels-unreadable"
            ) from None


def table_of(columns: dict[str, list[Any]]) -> pd.DataFrame:
    """Build the table from its columns."""
    whole = {name: pd.array(columns[name], dtype="Int64") for name in ("learned_epoch", "conflicts_with")}
    table = pd.DataFrame({**columns, **whole})
    return table.rename_axis("train")
